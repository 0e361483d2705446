"""The PyPI `openai` client against a running fleet: what an application does with it has to work.

Called as `client.py BASE_URL MODEL`; ends with 0 when everything held. Each check says what it protects.
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=180)
MODEL = sys.argv[2]
PROMPT = "Continue the story: once upon a time there was"
CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "List three colours."},
]


def models_are_listed():
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def a_chat_is_answered():
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=16, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == MODEL, answer
    assert choice.message.role == "assistant" and choice.message.content.strip(), answer
    assert choice.finish_reason in ("stop", "length"), answer
    usage = answer.usage
    assert usage.prompt_tokens > 10 and 0 < usage.completion_tokens <= 16, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def a_streamed_chat_says_the_same():
    arguments = dict(model=MODEL, messages=CHAT, max_completion_tokens=16, temperature=0)
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert len(chunks) > 5, "everything came in one piece"
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1]), reasons
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage, chunks[-1]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def no_usage_comes_unasked():
    stream = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def a_completion_is_answered_and_streamed():
    arguments = dict(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    whole = client.completions.create(**arguments)
    assert whole.object == "text_completion" and whole.choices[0].text.strip(), whole
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **arguments))
    assert text == whole.choices[0].text, (text, whole)


def a_stop_string_ends_the_answer_and_is_not_in_it():
    arguments = dict(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    text = client.completions.create(**arguments).choices[0].text
    stop = text[len(text) // 2 :][:5]
    before = text.split(stop)[0]
    for stops in (stop, ["not in it at all", stop]):
        cut = client.completions.create(stop=stops, **arguments).choices[0]
        assert cut.text == before and cut.finish_reason == "stop", (cut, text, stop)
        chunks = list(client.completions.create(stop=stops, stream=True, **arguments))
        assert "".join(chunk.choices[0].text for chunk in chunks) == before, (chunks, text, stop)
        assert chunks[-1].choices[0].finish_reason == "stop", chunks[-1]


def a_seed_repeats_an_answer():
    arguments = dict(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1, top_p=0.95)
    answers = [client.completions.create(seed=seed, **arguments).choices[0].text for seed in (7, 7, 8, 9)]
    assert answers[0] == answers[1], answers
    assert len(set(answers)) > 1, answers


def log_probabilities_are_reported():
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    tokens = chat.logprobs.content
    assert "".join(token.token for token in tokens) == chat.message.content, chat
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3, token
        # Greedy takes the likeliest.
        assert token.logprob == max(top.logprob for top in token.top_logprobs), token
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    found = completion.choices[0].logprobs
    assert "".join(found.tokens) == completion.choices[0].text, completion
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 6, found


def max_tokens_is_kept():
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 1 and answer.choices[0].finish_reason == "length", answer


def unknown_fields_are_ignored():
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"a_field_of_tomorrow": 1})


def the_ids_of_a_request_are_returned():
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.headers["x-baton-run"], raw.headers


def errors_are_those_of_openai():
    refused("model", openai.NotFoundError, model="no-such-model", prompt=PROMPT)
    refused("temperature", openai.BadRequestError, model=MODEL, prompt=PROMPT, temperature=9)
    refused("max_tokens", openai.BadRequestError, model=MODEL, prompt=PROMPT, max_tokens=-1)
    # Said, not silently answered with one.
    refused("n", openai.BadRequestError, model=MODEL, prompt=PROMPT, max_tokens=4, n=2)
    refused("top_p", openai.BadRequestError, model=MODEL, prompt=PROMPT, top_p=7)
    refused("prompt", openai.BadRequestError, model=MODEL, prompt="word " * 20000, max_tokens=1)
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "nobody", "content": "x"}])
    except openai.BadRequestError as error:
        assert "role" in (error.param or "") or "messages" in (error.param or ""), error.body
    else:
        raise AssertionError("a role that does not exist was accepted")


def refused(param, kind, **arguments):
    try:
        client.completions.create(**arguments)
    except kind as error:
        assert error.param == param, (param, error.body)
        assert error.body["message"] and error.body["type"], error.body
    else:
        raise AssertionError(f"{param} was accepted")


def main():
    checks = [
        models_are_listed,
        a_chat_is_answered,
        a_streamed_chat_says_the_same,
        no_usage_comes_unasked,
        a_completion_is_answered_and_streamed,
        a_stop_string_ends_the_answer_and_is_not_in_it,
        a_seed_repeats_an_answer,
        log_probabilities_are_reported,
        max_tokens_is_kept,
        unknown_fields_are_ignored,
        the_ids_of_a_request_are_returned,
        errors_are_those_of_openai,
    ]
    failed = 0
    for check in checks:
        try:
            check()
            print(f"held: {check.__name__}")
        except Exception as error:  # Every check is to be heard of, not only the first that fails.
            failed += 1
            print(f"FAILED: {check.__name__}: {type(error).__name__}: {error}")
    sys.exit(1 if failed else 0)


main()
