"""The page of a trace in a browser: it works, is readable, and is quiet."""

import json
import shutil
import time

import pytest

from tests.trace.pages import HOSTILE, Words, judged, speculated, weighted

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    folder = tmp_path_factory.mktemp("browser")
    pages = {
        "easd": speculated(150, rows=3, spans=True),
        "parse": judged(40),
        "smc": weighted(60),
    }
    for name, trace in pages.items():
        trace.save_html(folder / f"{name}.html", Words())
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(executable_path=DRIVER), options=options)
    driver.folder = folder
    yield driver
    driver.quit()


def visit(browser, name, scheme="light"):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get((browser.folder / f"{name}.html").as_uri())


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def focused(browser):
    return browser.execute_script("return document.activeElement.id")


def details(browser, number=0):
    script = f"return document.querySelectorAll('.row:not([hidden]) .details')[{number}].innerText"
    return browser.execute_script(script)


def into(browser, selector):
    browser.execute_script(f"document.querySelector('.row:not([hidden]) {selector} [tabindex=\"0\"]').focus()")


PAGES = ("easd", "parse", "smc")
# Every element that draws text, with its colour and the first opaque colour behind it.
CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
document.querySelectorAll("details").forEach((one) => { one.open = true; });
document.querySelectorAll(".text").forEach((one) => one.classList.add("drafts"));
const worst = {};
for (const one of document.querySelectorAll("body *")) {
  const own = Array.from(one.childNodes).some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !one.getClientRects().length || ["SCRIPT", "STYLE"].includes(one.tagName)) continue;
  const style = getComputedStyle(one);
  const ink = rgb(one.namespaceURI.endsWith("svg") ? style.fill : style.color);
  let behind = one, paper;
  for (; behind; behind = behind.parentElement) {
    paper = rgb(getComputedStyle(behind).backgroundColor);
    if (paper.length < 4 || paper[3] > 0) break;
  }
  const [a, b] = [light(ink), light(behind ? paper : [255, 255, 255])].sort((x, y) => y - x);
  const ratio = (a + .05) / (b + .05);
  const name = one.tagName + "." + (one.getAttribute("class") || "");
  worst[name] = Math.min(worst[name] || 99, ratio);
}
return worst;
"""


@in_browser
class TestInChromium:
    @pytest.mark.parametrize("name", PAGES)
    def test_no_error_and_no_request(self, browser, name):
        from selenium.webdriver.common.keys import Keys

        visit(browser, name)
        for part in (".text", ".tree") if name == "smc" else (".text",):
            into(browser, part)
            press(browser, Keys.ARROW_RIGHT)
        assert browser.get_log("browser") == []
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [one["params"] for one in sent if one["method"] == "Network.requestWillBeSent"]
        # The browser's own first tab asks for things too.
        asked = [one["request"]["url"] for one in asked if not one["documentURL"].startswith("chrome")]
        assert {url.split(":")[0] for url in asked} <= {"file", "data"}
        assert len([url for url in asked if url.startswith("file")]) == 1

    def test_what_tokens_spell_is_never_run(self, browser):
        visit(browser, "easd")
        for number in range(len(HOSTILE)):
            browser.execute_script(f"document.getElementById('e0-{number}').focus()")
        assert browser.execute_script("return window.pwned") is None
        assert browser.execute_script("return document.images.length") == 0
        assert browser.execute_script("return document.title") == "How easd wrote this text"

    def test_arrow_keys_walk_over_the_text_and_show_the_numbers(self, browser):
        from selenium.webdriver.common.keys import Keys

        visit(browser, "easd")
        into(browser, ".text")
        first = focused(browser)
        assert first == "e0-0"
        assert "plain token of the target" in details(browser)
        seen = {first}
        for _ in range(4):
            press(browser, Keys.ARROW_RIGHT)
            seen.add(focused(browser))
            row = "document.getElementById('r' + document.activeElement.id)"
            cells = browser.execute_script(f"return Array.from({row}.cells).map((cell) => cell.textContent)")
            assert all(cell in details(browser) for cell in cells[2:10] if cell)
            assert "%" in details(browser)
        assert len(seen) == 5
        press(browser, Keys.END)
        last = focused(browser)
        press(browser, Keys.ARROW_UP)
        above = focused(browser)
        press(browser, Keys.ARROW_DOWN)
        assert len({last, above, first}) == 3
        assert focused(browser) != above
        press(browser, Keys.HOME)
        assert focused(browser) == first

    def test_one_stop_of_tab_leads_in_and_one_out(self, browser):
        from selenium.webdriver.common.keys import Keys

        visit(browser, "smc")
        stops = []
        for _ in range(12):
            press(browser, Keys.TAB)
            stops.append(
                browser.execute_script("return document.activeElement.closest('.text, .tree, .legend')?.classList[0]")
            )
        assert stops.count("text") == 1
        assert stops.count("tree") == 1

    def test_enter_opens_the_drafts_that_were_replaced(self, browser):
        from selenium.webdriver.common.keys import Keys

        visit(browser, "easd")
        drafts = "Array.from(document.querySelectorAll('#text-0 .d'))"
        shown = f"return {drafts}.filter((one) => one.getClientRects().length).length"
        assert browser.execute_script(shown) == 0
        browser.execute_script("document.querySelector('#text-0 .residual').focus()")
        assert "in place of" in details(browser)
        press(browser, Keys.ENTER)
        assert browser.execute_script(shown) > 0
        press(browser, Keys.ENTER)
        assert browser.execute_script(shown) == 0
        browser.execute_script("document.querySelector('#row-0 input').click()")
        assert browser.execute_script(shown) == browser.execute_script(
            "return document.querySelectorAll('#text-0 .d').length"
        )

    def test_rows_are_tabs(self, browser):
        from selenium.webdriver.common.keys import Keys

        visit(browser, "easd")
        rows = "Array.from(document.querySelectorAll('.row'))"
        visible_rows = f"return {rows}.filter((one) => !one.hidden).map((one) => one.id)"
        assert browser.execute_script(visible_rows) == ["row-0"]
        browser.execute_script("document.getElementById('tab-0').focus()")
        press(browser, Keys.ARROW_RIGHT)
        assert focused(browser) == "tab-1"
        assert browser.execute_script(visible_rows) == ["row-1"]
        press(browser, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
        assert browser.execute_script(visible_rows) == ["row-2"]

    def test_pointing_shows_the_numbers_too(self, browser):
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        visit(browser, "easd")
        token = browser.find_element(By.CSS_SELECTOR, "#text-0 .accepted")
        ActionChains(browser).move_to_element(token).perform()
        assert "accepted draft" in details(browser)
        assert "log p" in details(browser)

    def test_the_tree_is_walked_by_keys(self, browser):
        from selenium.webdriver.common.keys import Keys

        visit(browser, "smc")
        into(browser, ".tree")
        assert "Round 0, particle 0" in details(browser, 1)
        press(browser, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
        assert focused(browser) == "n0-1-1"
        assert "Round 1, particle 1" in details(browser, 1)
        assert "log weight" in details(browser, 1)
        press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert "resampled" in details(browser, 1)

    def test_a_legend_entry_singles_out_its_tokens(self, browser):
        visit(browser, "easd")
        browser.execute_script("document.querySelector('#row-0 .legend button[data-kind=bonus]').click()")
        tokens = "Array.from(document.querySelectorAll('#text-0 .lit'))"
        lit = f"return {tokens}.map((one) => one.classList.contains('bonus'))"
        assert browser.execute_script(lit)
        assert all(browser.execute_script(lit))
        assert browser.execute_script("return document.querySelector('#text-0').classList.contains('dim')")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("name", PAGES)
    def test_all_text_has_contrast(self, browser, name, scheme):
        visit(browser, name, scheme)
        worst = browser.execute_script(CONTRAST)
        assert len(worst) > 10
        assert {kind: ratio for kind, ratio in worst.items() if ratio < 4.5} == {}

    def test_the_two_schemes_differ(self, browser):
        papers = []
        for scheme in ("light", "dark"):
            visit(browser, "smc", scheme)
            papers.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        assert papers[0] != papers[1]

    @pytest.mark.parametrize("name", PAGES)
    def test_a_narrow_window_does_not_scroll_sideways(self, browser, name):
        metrics = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        visit(browser, name)
        try:
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    @pytest.mark.parametrize("name", PAGES)
    def test_a_screen_reader_finds_names(self, browser, name):
        visit(browser, name)
        roles = {}
        give_up = time.monotonic() + 30  # the tree is built behind the page
        while "listbox" not in roles and time.monotonic() < give_up:
            roles.clear()
            for node in browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
                if not node.get("ignored"):
                    roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
        assert "The text, token by token" in roles["listbox"]
        assert len(roles["option"]) > 50
        for role in ("option", "button", "listbox", "complementary", "tab", "checkbox", "image", "img"):
            assert all(name.strip() for name in roles.get(role, [])), role
