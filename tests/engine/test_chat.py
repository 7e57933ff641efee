"""Chat templates: what they may do, what they may not, and that BOS comes once."""

import datetime

import pytest

from engine.chat import encode_chat, render_chat
from engine.errors import InvalidRequest
from engine.loaders.open import open_model
from engine.tokenizer import ByteTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def render(template: str | None, messages: list[dict[str, object]] | None = None) -> str:
    return render_chat(
        template,
        HELLO if messages is None else messages,
        bos_token="<bos>",
        eos_token="<eos>",
        now=datetime.datetime(2024, 7, 26),
    )


def test_demo_template() -> None:
    tokenizer = open_model("demo").tokenizer()
    text = render_chat(tokenizer.chat_template, HELLO, bos_token="", eos_token="")
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = encode_chat(tokenizer, HELLO)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert token_ids[0] == 1
    assert token_ids.count(1) == 3 and token_ids.count(2) == 2


def test_generation_prompt_is_optional() -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(template) == "Hello>"
    arguments = {"bos_token": "", "eos_token": "", "add_generation_prompt": False}
    assert render_chat(template, HELLO, **arguments) == "Hello"


def test_blocks_are_trimmed() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m['role'] }}\n{% endif %}\n{% endfor %}"
    )
    assert render(template) == "user\n"


def test_names_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<bos><eos>"
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{{ {'é': '<&>', 'a': [1, none]} | tojson }}") == '{"é": "<&>", "a": [1, null]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert render("{% if tools is none %}none{% endif %}") == "none"


def test_nothing_is_escaped() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<a & 'b'>"}]) == (
        "<a & 'b'>"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].missing.deeper }}", "missing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__ }}{{ ''.__class__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ '%s' | attr('format_map') }}{{ range(999999999) }}", "[Rr]ange"),
    ],
)
def test_template_errors_are_the_clients_to_read(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(template)
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)


def test_a_message_is_continued_where_it_ends() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    said = [*HELLO, {"role": "assistant", "content": "Hello, I am "}]
    rendered = render_chat(template, said, bos_token="", eos_token="", continue_final_message=True)
    assert rendered == "<user>Hello</s><assistant>Hello, I am "
    assert said[-1]["content"] == "Hello, I am "
    with pytest.raises(InvalidRequest, match="does not write the last message"):
        render_chat("x", said, bos_token="", eos_token="", continue_final_message=True)


def test_template_arguments() -> None:
    template = "{% if think %}yes{% else %}no{% endif %}"
    assert render(template) == "no"
    arguments = {"bos_token": "", "eos_token": "", "template_kwargs": {"think": True}}
    assert render_chat(template, HELLO, **arguments) == "yes"


def test_model_without_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template; send a prompt"):
        render(None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        encode_chat(ByteTokenizer(), HELLO)


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="messages: there are none"):
        render("x", [])


def test_bos_comes_once() -> None:
    writes_bos = ByteTokenizer(chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert encode_chat(writes_bos, HELLO) == [ByteTokenizer.BOS, *b"Hello"]
    silent = ByteTokenizer(chat_template="{{ messages[0].content }}{{ eos_token }}")
    assert encode_chat(silent, HELLO) == [*b"Hello", ByteTokenizer.EOS]


def test_surrogates_in_a_message() -> None:
    tokenizer = ByteTokenizer(chat_template="{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match=r"messages: .*surrogate"):
        encode_chat(tokenizer, [{"role": "user", "content": "\ud800"}])
