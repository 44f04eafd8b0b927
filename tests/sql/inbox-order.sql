-- ORDER in mailroom/order/traits.py
SELECT "order" FROM "mailroom".inbox_registry WHERE name = 'shipping'
