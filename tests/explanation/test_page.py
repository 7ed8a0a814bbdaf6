"""The page of an explanation is one well-formed file, with nothing from elsewhere."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from explained import Mlp, broken, image_net
from torch import Tensor, nn

from ort_dynamo import Explanation, explain
from ort_dynamo.explanation.html_page.elements import bar, element, table

_VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Reads a page, and checks that each element ends inside the one that it began in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def explained() -> list[Explanation]:
    with torch.no_grad():
        inference = explain(Mlp().eval(), torch.randn(3, 4))
    return [
        explain(Mlp(), torch.randn(3, 4), measure=True),
        explain(broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)),
        explain(image_net(), torch.randn(2, 3, 8, 8)),
        explain(Mlp(), torch.randn(3, 4), dynamic=True, options={"recompute_plan": "Gelu+Dropout+:1:-1"}),
        inference,
        explain(lambda x: x, torch.randn(3)),
    ]


@pytest.fixture(scope="module")
def pages() -> list[tuple[Explanation, str]]:
    from ort_dynamo.explanation.html_page.page import page

    return [(one, page(one)) for one in explained()]


def test_elements_nest_and_nothing_comes_from_elsewhere(pages: list[tuple[Explanation, str]]) -> None:
    for _, text in pages:
        page = Page(text)
        for tag, given in page.tags:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base")
            assert not {"src", "href", "srcset", "data", "action"} & given.keys()
        assert "http://" not in text
        assert "https://" not in text
        assert "@import" not in text
        assert "url(" not in text


def test_a_page_lists_operators_in_torch_with_reasons(pages: list[tuple[Explanation, str]]) -> None:
    for found, text in pages:
        shown = Page(text).text
        for one in found.outside:
            assert one.reason in shown
            assert one.change in shown


def test_a_page_shows_each_operator_below_its_module(pages: list[tuple[Explanation, str]]) -> None:
    for found, text in pages:
        every = [one for graph in found.graphs for role in graph.roles for one in role.operators]
        page = Page(text)
        kinds = [given.get("class") for tag, given in page.tags if tag == "li"]
        assert sorted(kinds) == sorted(f"t-{one.place}" for one in every)
        assert all(part in page.text for one in every for part in one.module.split("."))


def test_a_page_draws_the_memory_of_each_operator(pages: list[tuple[Explanation, str]]) -> None:
    for found, text in pages:
        if not found.graphs:
            continue
        data = re.search(r'<script type="application/json" id="memory">(.*?)</script>', text, re.DOTALL)
        assert data is not None
        points = json.loads(data[1])
        assert len(points) == sum(len(role.operators) for graph in found.graphs for role in graph.roles)
        assert "<polyline" in text


def test_a_page_shows_passes_before_and_after(pages: list[tuple[Explanation, str]]) -> None:
    found, text = pages[0]
    shown = Page(text).text
    (hoisted,) = [run for run in found.graphs[0].passes if run.name == "HoistRandom"]
    assert f"{hoisted.before} → {hoisted.after}" in shown
    operator, before, after = hoisted.operators[0]
    assert f"{operator} {before} → {after}" in shown


def test_measured_times_are_on_the_page(pages: list[tuple[Explanation, str]]) -> None:
    measured, plain = Page(pages[0][1]).text, Page(pages[1][1]).text
    assert "By class of module" in measured
    assert "By class of module" not in plain
    assert "Saved for the backward, by module" in plain
    assert "measure=True" in plain


def test_text_of_the_program_is_escaped(tmp_path: Path) -> None:
    def dangerous(x: Tensor) -> Tensor:
        return torch.fft.fft(x).real  # </script><script>alert("x & y")</script>

    path = explain(dangerous, torch.randn(4), options={"threads": 1}).save(tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert 'alert("x & y")' in Page(text).text


def test_modules_of_any_name_are_escaped(tmp_path: Path) -> None:
    name = """</script><script>alert(1)</script>'"`<img src=x onerror=alert(1)>"""

    class Hostile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(4, 4))
            self.register_parameter(f"{name} parameter", nn.Parameter(torch.ones(4)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self._modules[name](x) * self._parameters[f"{name} parameter"]).real

    Hostile.__name__ = Hostile.__qualname__ = name
    explained = explain(Hostile(), torch.randn(2, 4, requires_grad=True))
    text = explained.save(tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(key.startswith("on") for _, given in page.tags for key in given)
    assert name in page.text
    assert "<script>alert" not in html.unescape(
        re.search('srcdoc="([^"]*)"', explained._repr_html_())[1].replace(text, "")
    )  # type: ignore[index]


def test_elements_escape_text_and_attributes() -> None:
    assert element("p", "<b>&", title='"<') == '<p title="&quot;&lt;">&lt;b&gt;&amp;</p>'
    assert element("p", element("b", "x"), hidden=True, id=None) == "<p hidden><b>x</b></p>"
    assert element("input", id="find") == '<input id="find">'
    assert "<td>&lt;</td>" in table(("a",), [("<",)])
    assert 'style="width:25.00%"' in bar([("native", 1.0, "one")], 4.0)


def test_a_notebook_shows_the_page_in_a_frame(pages: list[tuple[Explanation, str]]) -> None:
    found, text = pages[0]
    shown = found._repr_html_()
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', shown, re.DOTALL)
    assert frame is not None
    assert html.unescape(frame[1]) == text


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.attention(self.norm1(x)).chunk(3, -1))
        weights = nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        x = x + nn.functional.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), 0.1)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1)


def test_the_page_of_twelve_layers_is_small(tmp_path: Path) -> None:
    model = nn.Sequential(*(Block(8) for _ in range(12)))
    found = explain(model, torch.randn(2, 4, 8, requires_grad=True))
    operators = sum(len(role.operators) for role in found.graphs[0].roles)
    assert operators > 800
    assert found.save(tmp_path / "page.html").stat().st_size < 1_500_000  # GPT-2 has some twice as many operators
