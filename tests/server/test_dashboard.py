"""The dashboard: what its files refer to, and how it behaves in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import httpx
import pytest
from typer.main import get_command

from siftkv.cli import app as cli
from siftkv.server import stats
from siftkv.server.metrics import ServerMetrics
from siftkv.server.settings import ServerSettings
from tests.server.dashboard_app import DASHBOARD, WORDS, TurningWorker, dashboard_app, served
from tests.server.live import Live, byte_llm
from tests.tiny import tiny_llm

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DIFFKV = "diffkv:alpha_high=1.1,alpha_low=0.95,window=8,sinks=2"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 20_000


class Document(HTMLParser):
    """The ids of a page, what its attributes point at, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.points_at: set[str] = set()
        self.files: set[str] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.append(found["id"])
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.points_at |= set(found.get(name, "").split())
        self.files |= {found[name] for name in ("src", "href") if not found.get(name, "data:").startswith("data:")}
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestFiles:
    page = Document((DASHBOARD / "index.html").read_text("utf-8"))
    scripts: ClassVar = {path.name: path.read_text("utf-8") for path in DASHBOARD.glob("*.js")}
    style = (DASHBOARD / "style.css").read_text("utf-8")

    def test_the_page_is_well_formed(self) -> None:
        assert self.page.open == []
        assert len(self.page.ids) == len(set(self.page.ids))
        assert self.page.points_at <= set(self.page.ids)

    def test_every_id_that_scripts_and_style_name_exists(self) -> None:
        named = {name for text in self.scripts.values() for name in re.findall(r'byId\("([\w-]+)"\)', text)}
        named |= {name for text in self.scripts.values() for name in re.findall(r'\bset\("([\w-]+)"', text)}
        ids = r"(?<![\w(:])#([a-z][\w-]+)(?=[^{};]*\{)"
        named |= set(re.findall(ids, self.style))
        assert len(named) > 25
        assert named <= set(self.page.ids)

    def test_files_and_imports_exist(self) -> None:
        imported = {x for text in self.scripts.values() for x in re.findall(r'(?:from|import) "\./([\w.]+)"', text)}
        assert self.page.files == {"dashboard/style.css", "dashboard/app.js"}
        assert imported | {"app.js"} == set(self.scripts)

    def test_nothing_is_fetched_from_elsewhere(self) -> None:
        for name, text in {**self.scripts, "style.css": self.style}.items():
            found = re.findall(r"https?://[^\s\"')]+", text)
            assert found == (["http://www.w3.org/2000/svg"] if name == "charts.js" else [])

    def test_both_themes_name_the_same_colours(self) -> None:
        light, dark = (
            set(re.findall(r"(--[\w-]+):", part))
            for part in re.findall(r":root \{(.*?)\}", self.style, flags=re.DOTALL)
        )
        assert light == dark
        used = set(re.findall(r"var\((--[\w-]+)\)", self.style + "".join(self.scripts.values())))
        assert used <= light


@pytest.fixture(scope="module")
def worker() -> Iterator[TurningWorker]:
    worker = TurningWorker(tiny_llm(DIFFKV, formats=["fp32"], max_num_seqs=3, check_integrity=False), pause=0.15)
    for i, kv in enumerate([DIFFKV, "full", DIFFKV, "full"]):
        worker.add(90, kv, 400, i, f"request-{i}")
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url(worker: TurningWorker) -> Iterator[str]:
    with served(dashboard_app(worker)) as url:
        yield url


class Watched:
    """A page whose console and failed requests are written down."""

    def __init__(self, browser: Browser, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, url: str) -> Page:
        self.page.goto(url)
        return self.page


def test_the_stream_sends_a_snapshot_a_second(url: str) -> None:
    with httpx.stream("GET", f"{url}/api/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        assert all(next(lines).startswith('data: {"time"') for _ in range(2))


class TestInBrowser:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 400])
    def test_it_shows_what_runs(self, browser: Browser, url: str, width: int, scheme: str) -> None:
        watched = Watched(browser, width, scheme)
        page = watched.open(url)
        page.wait_for_selector("#rate-chart path.series", state="attached")
        assert page.inner_text("#status") == "Live"
        assert page.inner_text("#tile-running") == "3"
        assert "1 waiting" in page.inner_text("#tile-running-note")
        assert page.inner_text("#tile-integrity") == "whole"
        assert page.locator("#requests tr").count() == 4
        assert page.locator("#kept rect").count() == 2 * 2
        assert page.locator("#tiers-chart path.area").count() >= 2
        assert page.evaluate("document.documentElement.scrollWidth") == width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
        assert dark == (scheme == "dark")
        assert watched.complaints == []

    def test_it_follows_the_stream(self, browser: Browser, url: str) -> None:
        watched = Watched(browser)
        page = watched.open(url)
        page.wait_for_selector("#requests tr")
        age = "document.querySelector('#requests td:nth-child(5)').textContent"
        before = page.evaluate(age)
        page.wait_for_function(f"{age} !== {before!r}")
        assert float(page.inner_text("#tile-rate").replace(",", "")) > 0

    def test_one_request_and_one_token(self, browser: Browser, url: str) -> None:
        watched = Watched(browser)
        page = watched.open(url)
        page.get_by_role("button", name="Look at request request-0").click()
        page.wait_for_selector("#fates-view:not([hidden])")
        assert "Request request-0, layer 0, head 0" in page.inner_text("#fates-text")
        page.locator("#kept rect[data-layer='1'][data-head='0']").click()
        assert "layer 1, head 0" in page.inner_text("#fates-text")
        page.locator("#kept").press("ArrowDown")
        assert "layer 1, head 1" in page.inner_text("#fates-text")
        page.locator("#fates").click(position={"x": 5, "y": 5})
        assert page.inner_text("#token-text").startswith("Token 0 is kept in 4 of 4 heads")
        page.locator("#fates").press("ArrowRight")
        assert page.inner_text("#token-text").startswith("Token 1 ")
        assert page.locator("#token rect").count() == 4
        page.get_by_label("of", exact=True).select_option("")
        assert page.locator("#fates-view").is_hidden()
        assert watched.complaints == []

    def test_a_waiting_request_holds_nothing(self, browser: Browser, url: str) -> None:
        page = Watched(browser).open(url)
        page.get_by_role("button", name="Look at request request-3").click()
        page.wait_for_function("document.getElementById('kept-text').textContent.includes('waiting')")
        assert page.locator("#fates-view").is_hidden()

    def test_the_chat_box_streams(self, browser: Browser, url: str) -> None:
        watched = Watched(browser)
        page = watched.open(url)
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("document.getElementById('try-usage').textContent.includes('KV cache')")
        assert page.inner_text("#try-answer") == "".join(WORDS)
        told = page.inner_text("#try-usage").replace("\xa0", " ")
        assert "25.0 % of bf16; k8v4 75 %, dropped 25 %" in told
        assert watched.complaints == []
        page.get_by_label("KV setting").fill("nonsense")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("document.getElementById('try-usage').textContent.startsWith('Refused')")
        assert "no policy 'nonsense'" in page.inner_text("#try-usage")

    def test_every_control_has_a_name(self, browser: Browser, url: str) -> None:
        page = Watched(browser).open(url)
        page.wait_for_selector("#requests tr")
        unnamed = page.evaluate(
            """[...document.querySelectorAll('button, input, select, textarea, [role=img], [tabindex]')]
            .filter(e => e.checkVisibility() && !(e.labels?.length || e.ariaLabel || e.textContent.trim()
              || e.hasAttribute('aria-labelledby'))).map(e => e.id)"""
        )
        assert unnamed == []

    def test_a_key_is_asked_for_and_kept(self, browser: Browser, worker: TurningWorker) -> None:
        with served(dashboard_app(worker, key="secret")) as url:
            page = Watched(browser).open(url)
            page.get_by_label("This server asks for an API key.").fill("secret")
            page.get_by_role("button", name="Connect").click()
            page.wait_for_selector("#requests tr")
            assert page.locator("#key-form").is_hidden()
            page.reload()
            page.wait_for_selector("#requests tr")

    def test_a_fault_of_the_cache_is_told(self, browser: Browser) -> None:
        llm = tiny_llm()
        llm.cache.state.counters[0] += 1
        with served(dashboard_app(TurningWorker(llm))) as url:
            page = Watched(browser).open(url)
            page.wait_for_selector("#fault:not([hidden])")
            assert "neither free nor counted as held" in page.inner_text("#fault")
            assert page.inner_text("#tile-integrity") == "FAULT"

    def test_the_real_server(self, browser: Browser) -> None:
        live = Live(byte_llm(), ServerSettings(drain_seconds=5)).ready()
        watched = Watched(browser)
        page = watched.open(live.url)
        long = {"prompt": "a sieve", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=long):
            page.get_by_role("button", name="Look at request").first.click()
            page.wait_for_selector("#fates-view:not([hidden])")
        page.wait_for_function(
            "document.getElementById('fates-text').textContent.includes('(ended; as it stood last)')"
        )
        page.get_by_label("Most tokens").fill("5")
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("document.getElementById('try-usage').textContent.includes('KV cache')")
        assert watched.complaints == []
        live.check_settled()
        live.worker.stop()
        live.close()
        assert not live._thread.is_alive()


class TestDeploy:
    folder = Path(__file__).parents[2] / "deploy"

    def test_grafana_asks_for_metrics_that_exist(self) -> None:
        board = json.loads((self.folder / "grafana-dashboard.json").read_text("utf-8"))
        asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        named = {name for expression in asked for name in re.findall(r"\b(?:siftkv|process)_\w+", expression)}
        metrics = ServerMetrics()
        metrics.finished("stop", 1.0, 0.1, 3, 4, "full")
        metrics.step(stats.collect(tiny_llm()))
        told = metrics.render()[0].decode()
        known = set(re.findall(r"^# TYPE (\w+)", told, flags=re.MULTILINE))
        known |= {f"{name}_bucket" for name in known}
        assert len(named) > 15
        assert named <= known
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(set(places)) == len(places)
        assert len({p["id"] for p in board["panels"]}) == len(places)

    def test_the_image_serves_with_options_that_exist(self) -> None:
        text = (self.folder / "Dockerfile").read_text("utf-8")
        assert re.findall(r"^FROM .* AS (\w+)$", text, flags=re.MULTILINE) == ["wheel", "base", "cpu", "cuda"]
        commands = [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", text, flags=re.MULTILINE)]
        assert len(commands) == 2
        known = {option for parameter in get_command(cli).commands["serve"].params for option in parameter.opts}  # type: ignore[attr-defined]
        assert {word for command in commands for word in command if word.startswith("--")} <= known
