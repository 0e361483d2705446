"""A tiny random Llama with a byte-level BPE tokenizer and a chat template: tiny_llama.py FOLDER [--seed N].

Run by the Python of vLLM's environment. The same versions and seed make the same bytes. The weights are larger than those that training
starts from, and the embeddings are not tied: what the model says next then depends on all of its context, so that one wrong block of
a KV cache shows in the text and not only in the last digits of its logprobs.
"""

import argparse
import os
import pathlib
import random
import sys
import tempfile

VOCABULARY = 4096
MAX_POSITIONS = 32768
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nFunctions: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYLLABLES = (
    "ba to ner ri so lu ment ing ver ka str el om pri de cu th an qu ia fer gol mi en sch wa ul or dis per con tre li no ex al "
    "ä ö ü ß é ñ œ ç я ж да ну 語 水 光 の は"
).split()
SENTENCES = (
    "The baton has one owner at a time, and whoever takes it checks that it is the right one.",
    'A worker answers {"role": "assistant", "content": null, "index": 0} or says what is wrong with 127 of 4096 tokens.',
    "Prefill reads the prompt once; decode adds one token after another, and both need the same cache.",
    "def next_token(logits): return max(range(len(logits)), key=lambda i: logits[i])  # ties go to the lower id",
)


def corpus():
    """Sentences of made-up words, rarer ones less often, so that merges of every length are learnt."""
    numbers = random.Random(7)
    words = ["".join(numbers.choices(SYLLABLES, k=numbers.randint(1, 4))) for _ in range(6000)]
    weights = [1 / (rank + 20) for rank in range(len(words))]
    for index in range(6000):
        if index % 10 == 0:
            yield SENTENCES[index // 10 % len(SENTENCES)]
        drawn = numbers.choices(words, weights=weights, k=numbers.randint(6, 18))
        yield " ".join(drawn).capitalize() + numbers.choice([".", "?", "!", ":", f" {numbers.randint(0, 9999)}."])


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(corpus(), trainer)
    end, _, end_of_message, padding = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=end, eos_token=end_of_message, pad_token=padding, model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(words: int, seed: int):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=words,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(configuration).to(torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside and renamed, so that whoever finds the folder finds all of it.
    with tempfile.TemporaryDirectory(dir=asked.folder.parent) as scratch:
        words = tokenizer()
        words.save_pretrained(scratch)
        model(len(words), asked.seed).save_pretrained(scratch)
        staged = pathlib.Path(scratch) / "model"
        staged.mkdir()
        for path in pathlib.Path(scratch).iterdir():
            if path != staged:
                path.rename(staged / path.name)
        if not asked.folder.exists():
            os.replace(staged, asked.folder)
    print(asked.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
