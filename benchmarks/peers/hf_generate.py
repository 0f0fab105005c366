"""Hugging Face's generate on a queue of random prompts, in batches; each samples until it ends or has --new tokens."""

import time

import torch
from torch_peer import llama_config, make_parser, report
from transformers import LlamaForCausalLM


def main():
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(options)).eval()
    prompts = torch.randint(4, options.vocab, (options.queue, options.prompt))
    if options.compile:
        model.forward = torch.compile(model.forward)
    step_s, tokens = [], []
    for _ in range(options.steps):
        began, count = time.perf_counter(), 0
        for start in range(0, options.queue, options.batch):
            batch = prompts[start : start + options.batch]
            with torch.inference_mode():
                out = model.generate(
                    batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=options.new, eos_token_id=2, pad_token_id=0,
                )
            answers = out[:, options.prompt :]
            ended = (answers == 2).int()
            count += int((ended.cumsum(1) - ended == 0).sum())  # Up to and including the first stop token.
        step_s.append(time.perf_counter() - began)
        tokens.append(count)
    report("hf", step_s, tokens=tokens)


main()
