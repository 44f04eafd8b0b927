// What the page does beyond htmx: it refreshes only while somebody looks and nobody types, keeps the focus, and copies
// commands. Without it every page and every form still works.
(function () {
  "use strict";

  var paused = false;
  var failed = false;

  function live() {
    return document.getElementById("live");
  }

  // A form that is open would be closed by what comes; a text that is typed would be lost, and so would ticks.
  function isUsed() {
    var of = live();
    var at = document.activeElement;
    return Boolean(of && (of.querySelector(":popover-open, .pick:checked")
      || (of.contains(at) && at.matches("input:not([type=checkbox]), select, textarea"))));
  }

  // What the form of ticked rows acts on. A row may not know how many messages it holds.
  function tellTicked() {
    var told = document.querySelector("#ticked .ticked");
    if (!told) return;
    var rows = document.querySelectorAll(".pick:checked");
    var numbers = Array.prototype.map.call(rows, function (each) { return Number(each.dataset.holds); });
    var most = numbers.reduce(function (one, other) { return one + other; }, 0);
    var held = Number.isNaN(most) ? "an unknown number of messages" : most + (most === 1 ? " message" : " messages");
    told.textContent = rows.length + " " + told.dataset.one + (rows.length === 1 ? "" : "s") + " with " + held;
    document.querySelector("[popovertarget=ticked]").disabled = !rows.length;
  }

  function tell() {
    var state = document.getElementById("refresh-state");
    if (!state) return;
    var text = "refreshes every 5 s";
    if (paused) text = "paused";
    else if (document.hidden) text = "paused while hidden";
    else if (document.querySelector(".pick:checked")) text = "paused while keys are ticked";
    else if (isUsed()) text = "paused while you type";
    else if (failed) text = "not answered, trying again";
    if (state.textContent !== text) state.textContent = text;
  }

  document.addEventListener("htmx:beforeRequest", function (event) {
    if (event.target.id === "live" && (paused || document.hidden || isUsed())) event.preventDefault();
    tell();
  });
  ["htmx:responseError", "htmx:sendError"].forEach(function (name) {
    document.addEventListener(name, function (event) {
      failed = true;
      tell();
      if (event.target.id !== "live") {
        event.target.textContent = "Not answered: it took too long, or the dashboard has ended. Load the page again.";
      }
    });
  });

  var focused = null;
  document.addEventListener("htmx:beforeSwap", function (event) {
    // It was asked for before the form was opened.
    if (event.target.id === "live" && isUsed()) event.detail.shouldSwap = false;
    var at = document.activeElement;
    focused = live() && live().contains(at) && at.getAttribute("href");
  });
  document.addEventListener("htmx:afterSettle", function () {
    failed = false;
    prepare();
    tell();
    if (!focused) return;
    var again = Array.prototype.find.call(live().querySelectorAll("a[href]"), function (each) {
      return each.getAttribute("href") === focused;
    });
    if (again) again.focus({ preventScroll: true });
  });

  document.addEventListener("visibilitychange", function () {
    tell();
    if (!document.hidden && live() && window.htmx) window.htmx.trigger(live(), "look");
  });
  document.addEventListener("toggle", tell, true);
  document.addEventListener("focusin", tell);
  document.addEventListener("focusout", tell);

  document.addEventListener("click", function (event) {
    var button = event.target.closest("button");
    if (!button) return;
    // Only one of the two acts of this form needs it.
    if (button.form && button.form.id === "ticked" && button.type === "submit") {
      var sure = button.form.elements.sure;
      if (sure) sure.required = button.classList.contains("danger");
    }
    if (button.id === "refresh") {
      paused = !paused;
      button.setAttribute("aria-pressed", String(paused));
      button.textContent = paused ? "Go on" : "Pause";
      tell();
    } else if (button.classList.contains("copy")) {
      navigator.clipboard.writeText(button.previousElementSibling.textContent).then(function () {
        button.textContent = "Copied";
        window.setTimeout(function () { button.textContent = "Copy"; }, 1500);
      });
    }
  });

  document.addEventListener("change", function (event) {
    if (event.target.matches(".pick-all")) {
      document.querySelectorAll(".pick").forEach(function (each) { each.checked = event.target.checked; });
    }
    tellTicked();
    tell();
  });

  function prepare() {
    document.querySelectorAll(".pick-all[hidden]").forEach(function (each) { each.hidden = false; });
    tellTicked();
    if (navigator.clipboard) {
      document.querySelectorAll("button.copy[hidden]").forEach(function (each) { each.hidden = false; });
    }
  }

  var refresh = document.querySelector(".refresh");
  if (refresh) refresh.hidden = false;
  prepare();
  tell();
})();
