"""The page of a run in a real browser: filters, groups, curves, keys, themes; live while records grow.

Needs Chromium with its driver and the package selenium; skipped without them.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.report.live import LiveRun, LiveServer
from multitask_rl.report.summary import summarise_run
from record_builders import sample, write_records

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
from selenium.webdriver.common.by import By  # noqa: E402 - of the package that may be missing
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and chromedriver")

EVIL = "<img src=x onerror='document.title=1'></script><script>document.title=2</script> \u202egnp.exe"
SCORE = {"task": "sums", "metric": "m", "direction": "higher"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "force-prefers-reduced-motion",
        "window-size=1200,900",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def records(directory: Path) -> Path:
    verdict = {"cost": 1.0, "violated": True, "reason": "it has a digit"}
    tokens = {"texts": ["right", " or"], "logprobs": [-0.1, -3.0], "advantages": [0.5, -0.5]}
    rollouts = [
        sample(
            step,
            task=task,
            prompt_id=f"{task}/{step}",
            sample=number,
            reward=number / 2,
            response=f"right or {number}",
            response_ids=[1] * (number + 1),
            breakdown={"exact": {"value": number / 2, "components": {"close": 0.75}}},
            tokens=tokens,
        )
        for step in range(1, 41)
        for task in ("sums", "words")
        for number in range(3)
    ]
    rollouts[-1] |= {"rejected": True, "verdicts": {"no_digit": verdict}}
    rollouts[-2] |= {"failure": {"kind": "timeout", "message": "30 s", "source": "slow"}, "reward": None}
    rollouts[0] |= {"response": EVIL}
    metrics = [
        {"step": step, f"task/{task}/reward_mean": step / 40, "time/step_s": 1.5}
        for step in range(1, 41)
        for task in ("sums", "words")
    ]
    scores = [
        {**SCORE, "task": task, "step": step, "values": [0.0, 1.0, step / 40] * 4}
        for step in (0, 20, 40)
        for task in ("sums", "words")
    ]
    event = {"step": 20, "source": "guard", "kind": "alarm", "task": "sums", "reason": "it fell"}
    spans = [{"stage": "rollout", "task": "", "step": 40, "start": 0.0, "end": 1.0}]
    return write_records(
        directory, rollouts=rollouts, metrics=metrics, evaluations=scores, events=[event], timeline=spans
    )


@pytest.fixture
def see(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Return a function that waits for the one node of a selector and for it to be drawn."""

    def found(selector: str) -> Any:
        def drawn(driver: Any) -> Any:
            nodes = driver.find_elements(By.CSS_SELECTOR, selector)
            return nodes[0] if nodes and nodes[0].is_displayed() else None

        return WebDriverWait(browser, 5, poll_frequency=0.02).until(drawn, selector)

    yield found
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []


def until(browser: Any, script: str, value: object) -> None:
    """Wait until a script returns ``value``."""
    found: list[object] = []

    def is_so(driver: Any) -> bool:
        found[:] = [driver.execute_script(f"return {script}")]
        return found == [value]

    try:
        WebDriverWait(browser, 5, poll_frequency=0.02).until(is_so)
    except Exception as error:
        raise AssertionError(f"{script}: expected {value!r}, got {found}") from error


ROWS = "document.querySelectorAll('.list button[id]').length"
COUNT = "document.querySelector('#samples-body > [role=status]').textContent"


def test_a_reader_filters_opens_groups_and_uses_the_keys(browser: Any, see: Any, tmp_path: Path) -> None:
    page = records(tmp_path) / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    see(".list button")
    until(browser, ROWS, 200)
    until(browser, COUNT, "240 of 240 samples")
    body = browser.find_element(By.TAG_NAME, "body")

    Select(see("#task")).select_by_visible_text("words")
    until(browser, COUNT, "120 of 240 samples")
    Select(see("#verdict")).select_by_visible_text("refused")
    until(browser, COUNT, "1 of 240 samples")
    see(".list button").click()
    assert "Why refused" in see("article.chosen").text
    assert "it has a digit" in see("article.chosen").text
    assert len(browser.find_elements(By.CSS_SELECTOR, "article")) == 3, "its siblings are beside it"
    see("article .tag")
    body.send_keys("x")
    until(browser, COUNT, "240 of 240 samples")

    Select(see("#failure")).select_by_visible_text("failed: timeout")
    until(browser, ROWS, 1)
    body.send_keys("x", "/", "or 2", Keys.ESCAPE)
    until(browser, COUNT, "80 of 240 samples")
    see("#from").send_keys("39")
    until(browser, COUNT, "4 of 240 samples")
    body.send_keys("j")
    until(browser, "document.querySelectorAll('.list [aria-current=true]').length", 1)
    first = see("article.chosen").text
    assert "close\n0.75" in first.replace(" ", "\n")
    body.send_keys("j", "j")
    until(browser, "document.querySelector('.list button:nth-child(4)').ariaCurrent", "true")
    body.send_keys("k", "c")
    until(browser, "document.querySelectorAll('.token').length > 1", True)
    assert "probability 0.9048" in see(".token").get_attribute("title")
    body.send_keys("c")
    until(browser, "document.querySelector('.token').title.includes('advantage 0.5')", True)

    body.send_keys("?")
    assert "next sample" in see("#help").text
    body.send_keys(Keys.ESCAPE)
    body.send_keys("t")
    until(browser, "document.documentElement.dataset.theme", "dark")


def test_curves_show_numbers_and_decisions_under_the_pointer_and_by_keys(
    browser: Any, see: Any, tmp_path: Path
) -> None:
    page = records(tmp_path) / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    plot = see("#chart-reward_mean .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    webdriver.ActionChains(browser).move_to_element_with_offset(plot, -3, 0).perform()
    tip = see("#chart-reward_mean .tip")
    assert "step 20" in tip.text
    assert "sums" in tip.text
    assert "guard alarm · sums: it fell" in tip.text
    see("#chart-reward_mean .plot").send_keys(Keys.END, Keys.ARROW_LEFT)
    until(browser, "document.querySelector('#chart-reward_mean .tip strong').textContent", "step 39")
    see("#chart-held-out .quiet").send_keys(Keys.ENTER)
    assert "sums" in see("#chart-held-out table").text
    see("#learning-body .chip").send_keys(Keys.SPACE)
    until(browser, "document.querySelectorAll('#learning-body .chip[aria-pressed=false]').length", 1)
    controls = "[...document.querySelectorAll('button, select, input')].filter(node => !node.hidden)"
    unnamed = "node => !(node.textContent || node.ariaLabel || node.labels?.length)"
    found = browser.execute_script(f"return {controls}.filter({unnamed}).map(node => node.outerHTML)")
    assert found == [], "a screen reader has no name for them"


NARROW = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
BEYOND = """return Math.max(...[...document.querySelectorAll(arguments[0])].map(
    node => node.getBoundingClientRect().right)) - innerWidth"""


def test_a_narrow_window_has_verdicts_and_decisions_in_sight(browser: Any, see: Any, tmp_path: Path) -> None:
    page = records(tmp_path) / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", NARROW)
    browser.get(page.as_uri())
    see("#overview tbody span.muted, #overview tbody span.good")
    assert browser.execute_script(BEYOND, "#overview tbody td:nth-child(2)") <= 0, "read without scrolling"
    inside = "document.querySelector('#decisions .told').getBoundingClientRect().left"
    frame = "document.querySelector('#decisions ul').getBoundingClientRect().left"
    assert browser.execute_script(f"return {inside} - {frame}") > 8, "texts keep off the frame"
    see(".list button").click()
    until(browser, "document.querySelector('.siblings')?.getBoundingClientRect().top < innerHeight", True)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_texts_of_a_model_stay_texts(browser: Any, see: Any, tmp_path: Path) -> None:
    page = records(tmp_path) / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    see("#find").send_keys("gnp.exe")
    until(browser, ROWS, 1)
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE, "j")
    assert "⟨U+202E⟩gnp.exe" in see("article .text").text, "what turns texts around is named"
    assert browser.title == str(tmp_path)
    assert (
        browser.execute_script("return document.querySelectorAll('article img, article script').length") == 0
    )


def test_a_reader_walks_through_compared_runs(browser: Any, see: Any, tmp_path: Path) -> None:
    runs = []
    for number, setting in enumerate("aabc"):
        runs.append(tmp_path / str(number))
        runs[-1].mkdir()
        records(runs[-1])
        (runs[-1] / "config.yaml").write_text(f"seed: {number}\nsetting: {setting}\n")
        shift = 0.1 * "abc".index(setting)
        scores = [
            {
                **SCORE,
                "task": task,
                "step": step,
                "prompts": "p",
                "values": [shift + i / 20 for i in range(12)],
            }
            for step in (0, 20, 40)
            for task in ("sums", "words")
        ]
        write_records(runs[-1], evaluations=scores)
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    assert "2 (seeds 0, 1)" in see("#arms tbody").text
    see("#arms thead th:last-child button").send_keys(Keys.ENTER, Keys.ENTER)
    until(browser, "document.querySelector('#arms tbody th').textContent", "setting=c")
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys("n")
    until(browser, "document.querySelector('#differences caption').textContent.startsWith('setting=c')", True)
    assert "better" in see("#differences tbody").text
    see("#held-out .plot").send_keys(Keys.END)
    assert "setting=b" in see("#held-out .tip").text
    body.send_keys("u")
    until(browser, "document.getElementById('unit').value", "seconds")
    assert "; dominated" in see(".scatter g").get_attribute("aria-label")
    body.send_keys("/", "right or 1", Keys.ESCAPE, "j")
    until(browser, "document.querySelectorAll('#prompts article').length", 3)
    assert "right or 1" in see("#prompts article").text
    assert "setting" in see("#settings table").text
    found = browser.execute_script("return document.querySelectorAll('article img, article script').length")
    assert found == 0
    read = "return [...document.querySelectorAll('.scatter .grid + text')].map(node => node.textContent)"
    ticks = browser.execute_script(read)
    assert ticks, "of both axes"
    assert all(len(tick.lstrip("-0.")) <= 2 for tick in ticks), f"round numbers: {ticks}"
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", NARROW)
    read_first = "caption span, tbody th, #differences tbody td:nth-child(2)"
    assert browser.execute_script(BEYOND, read_first) <= 0, "read without scrolling"
    scale = (
        "const svg = document.querySelector('.scatter'); return svg.clientWidth / svg.viewBox.baseVal.width"
    )
    until(browser, f"(() => {{ {scale} }})() > 0.95", True)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve the page of the records in ``tmp_path``."""
    records(tmp_path)
    with LiveServer(LiveRun(tmp_path, summarise_run, most_work=1.0), str(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server.address
        server.shutdown()


def test_a_live_page_grows_and_keeps_filters_and_place(
    browser: Any, see: Any, tmp_path: Path, address: str
) -> None:
    browser.get(address)
    Select(see("#task")).select_by_visible_text("words")
    until(browser, COUNT, "120 of 240 samples")
    browser.find_element(By.TAG_NAME, "body").send_keys("j", "j")
    chosen = see("article.chosen").text
    browser.execute_script("document.querySelector('article').scrollIntoView({behavior: 'instant'})")
    place = see("article.chosen").rect["y"] - browser.execute_script("return scrollY")
    more = [sample(41, task="words", response=f"new {i}") for i in range(5)]
    with (tmp_path / "rollouts.jsonl").open("a") as lines:
        lines.writelines(json.dumps(line) + "\n" for line in more)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 41, "task/sums/reward_mean": 0.0}) + "\n")
    button = see(".side > button")
    assert button.text == "show 5 new samples"
    assert "step 41" in see("#subtitle").text
    assert see("article.chosen").text == chosen
    now = see("article.chosen").rect["y"] - browser.execute_script("return scrollY")
    assert abs(now - place) < 2
    assert Select(see("#task")).first_selected_option.text == "words"
    button.send_keys(Keys.ENTER)
    until(browser, COUNT, "125 of 245 samples")
    until(browser, "document.querySelector('.list .start').textContent", "new 4")
    browser.get("about:blank")
