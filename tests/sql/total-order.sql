-- IS_TOTAL in mailroom/order/total.py
SELECT "order" = 'total' FROM "mailroom".inbox_registry WHERE name = 'shipping'
