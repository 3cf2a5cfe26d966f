"""What of a rendered conversation is learned: where a response ends, and what is no part of it."""

import pytest
from chat_texts import byte_level, said

from fastbrain.errors import InvalidDataset
from fastbrain.tokens.chat_template import ChatTemplate


def template(assistant: str, other: str = "{{ m.content }}<|im_end|>") -> ChatTemplate:
    """One that renders what the assistant says so, and what others say so."""
    inside = "{% if m.role == 'assistant' %}" + assistant + "{% else %}" + other + "{% endif %}"
    return ChatTemplate(byte_level(), "{% for m in messages %}" + inside + "{% endfor %}")


def test_white_space_after_the_end_within_a_block_does_not_hide_the_end():
    block = "{% generation %}{{ m.content }}<|im_end|>\n{{ ' ' }}{% endgeneration %}"
    shown = template(block).marked(said("Q", "Yes", "R", "No"))
    assert shown == "Q<|im_end|>[[Yes<|im_end|>\n ]]R<|im_end|>[[No<|im_end|>\n ]]"


def test_the_end_of_a_blank_message_is_not_that_of_the_response_before_it():
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    with pytest.raises(InvalidDataset, match="no special token after a response"):
        template(block).encode(said("Q", "Yes", " ", "No"))


def test_a_template_can_see_that_a_content_is_empty():
    used = "{% if m.content %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}"
    found = template("{{ m.content }}<|im_end|>", used)
    system = {"role": "system", "content": ""}
    assert found.encode([system, *said("Q", "Yes")]) == found.encode(said("Q", "Yes"))
