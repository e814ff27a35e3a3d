"""Show how the base and each adapter answer, on the CPU with transformers and PEFT.

For the same prompts: a completion and a chat, greedy and at temperature 0.8.
"""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
COMPLETION, CHAT = "The king said", "Tell me a story."
MAX_NEW_TOKENS = 160


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, temperature: float) -> str:
    """What the model writes after `prompt`, special tokens included."""
    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    torch.manual_seed(0)
    chosen = {"do_sample": True, "temperature": temperature, "top_k": 40} if temperature else {"do_sample": False}
    if not temperature:
        chosen |= {"temperature": None, "top_k": None}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, **chosen)
    return tokenizer.decode(made[0, ids.shape[1] :])


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HERE / "base")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT}], tokenize=False, add_generation_prompt=True
    )
    folders = sorted((HERE / "adapters").iterdir())
    for folder in [None, *folders]:
        model = AutoModelForCausalLM.from_pretrained(HERE / "base", dtype=torch.float32).eval()
        if folder is not None:
            model = PeftModel.from_pretrained(model, folder).eval()
        for prompt in (COMPLETION, chat):
            for temperature in (0.0, 0.8):
                kind = "chat" if prompt is chat else "completion"
                print(f"===== {folder.name if folder else 'base'}, {kind}, temperature {temperature}")
                print(answer(model, tokenizer, prompt, temperature), flush=True)


if __name__ == "__main__":
    main()
