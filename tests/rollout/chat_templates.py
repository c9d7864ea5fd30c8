"""Chat templates in the manner of well-known model families, written for these tests, and a tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# As Qwen2.5 has it: a default system message, tools in it, neighbouring tool messages in one user turn.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'Be helpful.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3 has it: reasoning stays only in assistant turns after the last user message; the last turn always has some.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
            if '</think>' in message.content else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As SmolLM2 has it: plain ChatML with a default system message.
SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As Llama 3 has it: a token opens the conversation, contents are trimmed, nothing separates the turns.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message.role + '<|end|>\n\n' + message.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)

# As Mistral has it: a space before the closing token, and the tools before the last user message.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{% if tools and (loop.last or loop.index0 == messages | length - 2) %}{{ '[TOOLS]' + tools | tojson }}{% endif %}"
    "{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|eot|>", "<s>", "</s>"]
TEXT = "hello world, how are you? the answer is a number from 1 to 8\nuser assistant system tool higher lower {}\"',:"


def folder(path: Path, template: str, *, eos: str = "<|im_end|>", **files: dict) -> Path:
    """A model folder with the template and a byte-level BPE tokenizer, which can encode anything."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": eos, "bos_token": {"content": "<s>"}}
    written = {"tokenizer_config": settings, "config": {"eos_token_id": tokenizer.token_to_id(eos)}, **files}
    for name, content in written.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path
