import json

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from isojax.rl.tokenizer import PADDED_VOCAB, byte_tokenizer

TEXT = "héllo\n  wörld 你好 <|im_start|>user\nx<|im_end|>\t🙂 isn't"
_tokenizer = byte_tokenizer()


@given(st.text(st.characters(codec="utf-8")).filter(lambda text: "<|" not in text))
def test_ids_are_the_bytes_of_the_text_and_decode_to_it(text):
    ids = _tokenizer.encode(text)
    assert ids == list(text.encode())
    assert _tokenizer.decode(ids) == text


def test_special_tokens_follow_the_bytes_and_fit_the_padded_vocabulary():
    assert _tokenizer.encode("<|endoftext|><|im_start|>a<|im_end|>") == [256, 257, ord("a"), 258]
    assert (_tokenizer.pad_token_id, _tokenizer.eos_token_id, len(_tokenizer)) == (256, 258, 259)
    assert len(_tokenizer) <= PADDED_VOCAB


def test_a_saved_folder_is_read_by_auto_tokenizer_whatever_the_model_type(tmp_path):
    _tokenizer.save_pretrained(tmp_path)
    for model_type in ("qwen3_5_moe_text", "qwen3_5_moe", "qwen3_5_text"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        read = AutoTokenizer.from_pretrained(tmp_path)
        assert read.encode(TEXT) == _tokenizer.encode(TEXT)
        assert read.decode(read.encode(TEXT)) == TEXT
        assert (read.eos_token, read.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_chat_is_turns_and_the_start_of_the_answer():
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]
    text = _tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
