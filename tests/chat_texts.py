"""Templates, tokenizers and conversations that the tests of instruction data share."""

from functools import cache

from texts import TOPICS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

from fastbrain.tokens.chat_template import CHATML
from fastbrain.tokens.tokenizer import train_tokenizer
from fastbrain.tokens.tokenizer_files import TokenizerFiles

# as models have them, without marks of what is learned
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# trims, and begins with a token of its own
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
# puts what the system says into the first prompt, as a macro, and refuses other orders
MERGING = """{% macro said(m) %}{{ m['content'].strip() }}{% endmacro %}
{% if messages[0].role == 'system' %}
    {% set first = said(messages[0]) + '\n\n' %}{% set turns = messages[1:] %}
{% else %}
    {% set first = '' %}{% set turns = messages %}
{% endif %}
{% for m in turns %}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if m.role == 'user' %}
[INST] {{ (first if loop.first else '') + said(m) }} [/INST]
    {%- else %}
 {% generation %}{{ said(m) + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
# a block around the content alone, the end after it
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    " <|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
# the end of the text after the last response alone is left to us
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n"
    "{% else %}A: {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "smol": SMOL,
    "llama": LLAMA,
    "trimming": LLAMA.replace("{%- generation %}", "").replace("{%- endgeneration %}", ""),
    "merging": MERGING,
    "bare": BARE,
    "plain": PLAIN,
}
_SPECIAL = ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<tool>")


def said(*contents, first="user"):
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


CONVERSATIONS = {
    "one turn": said("Name a color.", "Blue."),
    "three turns": said("Hi", "Hello!", "And 2 + 2?", "It is 4.\n\nFour.", "Bye", "Bye now"),
    "scripts": said("\u00c9t\u00e9 \u4e2d\u6587?", "\U0001f600 oui \U0001f469\u200d\U0001f680\n"),
    "white space": said("  lead\n", "\n\n  code:\n\tx = 1  \n", " again ", "trail  "),
    "spaces": said(" ", "  \u00a0x \u0085", "\n", "  <|'  12 \u200d"),
    "system": [{"role": "system", "content": " Be brief. "}, *said("Why?", "So.")],
    "braces": said("{{ bos_token }} {% if %}", "[INST] {# no #} </s> <im_end>"),
    "private characters": said("\ue000\ue001 0", "\ue0021\ue003 \ue004"),
}


@cache
def byte_level():
    """A byte-level tokenizer of ours with some more special tokens."""
    tokenizer = train_tokenizer([*TOPICS[:10], "user assistant system\n" * 50], 600)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return TokenizerFiles(tokenizer, "<|endoftext|>", "<|pad|>", bos="<|begin|>")


@cache
def metaspace():
    """One that marks the first word of a text, and whose ends take white space around them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ends = [AddedToken("<|im_end|>", rstrip=True), AddedToken("<|endoftext|>", lstrip=True)]
    special = ["<unk>", AddedToken("<|im_start|>", rstrip=True), *ends, *_SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TOPICS[:10], trainer)
    return TokenizerFiles(tokenizer, "<|endoftext|>", "<|endoftext|>", bos="<|begin|>")


TOKENIZERS = {"byte-level": byte_level, "metaspace": metaspace}
