"""Chat templates of the forms in use, written for the tests: how each opens and ends a turn is what matters."""

# A header a turn; the answer's is asked for.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# The answer's header stands at the end of every text, asked for or not.
LLAMA3_EARLY = LLAMA3.replace("{%- if add_generation_prompt %}", "").replace("{%- endif %}", "")

# Answers have no header.  Roles must alternate.
LLAMA2 = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Headers are plain text, and the answer's is written inside the loop, so not before a first turn.
ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' + message.content + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

# The assistant is called model.
GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

# What was thought is kept in the last turn only.
QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = content.split('</think>')[0] if '</think>' in content else '' %}
        {%- set content = content.split('</think>')[-1] | trim %}
        {%- if loop.last %}
            {%- set content = '<think>\\n' + thought | replace('<think>', '') | trim + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Neither a header nor an end is a control token; the only one is at the beginning.
ALPACA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '### ' + message.role + ':\\n' + message.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### assistant:\\n' }}
{%- endif %}"""

# The answer's header is written with the answer only: nobody can ask for it.
SILENT = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""
