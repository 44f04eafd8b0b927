"""What tests do in a window of a browser: look, and act by clicks."""

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tests.support.waiting import eventually

T = TypeVar("T", bound=Callable[..., Any])
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1400, 390)]


def does(*paths: str) -> Callable[[T], T]:
    """Say to which paths the forms of pages post in a test; the test is held to it (`posts_what_it_says`)."""

    def said(test: T) -> T:
        test.does = frozenset(paths)  # type: ignore[attr-defined]
        return test

    return said


def forms_sent(window: Any) -> set[str]:
    """Return to which paths forms were sent since the last call; what a script posted itself is left out."""
    events = [json.loads(each["message"])["message"] for each in window.get_log("performance")]
    sent = [each["params"] for each in events if each["method"] == "Network.requestWillBeSent"]
    paths = [
        urlsplit(each["request"]["url"]).path
        for each in sent
        if each["request"]["method"] == "POST" and each["type"] == "Document"
    ]
    return {path[max(path.find("/act/"), 0) :] for path in paths}


def find(window: Any, selector: str) -> Any:
    return window.find_element("css selector", selector)


def text_of(window: Any, selector: str) -> str:
    # In one step, since the page may be replaced between two.
    return str(window.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def shows(window: Any, text: str) -> None:
    eventually(lambda: text in text_of(window, "main"))


def _opened(window: Any, label: str, nth: int) -> Any:
    from selenium.common.exceptions import StaleElementReferenceException

    try:
        opens = [each for each in window.find_elements("css selector", ".opens") if each.text == f"{label}…"][nth]
        form = find(window, f"#{opens.get_attribute('popovertarget')}")
        if not form.is_displayed():
            opens.click()
        return form if form.is_displayed() else None
    except StaleElementReferenceException:  # the page has refreshed itself meanwhile
        return None


def act(
    window: Any, label: str, why: str = "by clicks", *, sure: bool = False, nth: int = 0, on: str | None = None
) -> None:
    """Open the first form of that label, or the `nth` after it, say why, and send it. It acts `on` so much, it says."""
    form = eventually(lambda: _opened(window, label, nth))
    if on is not None:
        assert form.find_element("css selector", ".on").text.startswith(f"{on}. ")
    form.find_element("css selector", "input[name=why]").send_keys(why)
    if sure:
        form.find_element("css selector", "input[name=sure]").click()
    form.find_element("css selector", "button[type=submit]").click()


def looked_at(window: Any, scheme: str, width: int) -> None:
    """Have the window look like that at once. A phone is narrower than any window may be."""
    given = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}  # no color is on its way to another
    features = [{"name": name, "value": value} for name, value in given.items()]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
