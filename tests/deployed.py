"""Greedy accuracy of a checkpoint in plain transformers and plain vLLM, without any of trueup's engines.

python deployed.py CHECKPOINT PROBLEMS      prints {"transformers": accuracy, "vllm": accuracy}
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trueup.tasks import load_task

folder, count = sys.argv[1], int(sys.argv[2])
task, tokenizer = load_task("sums", heldout=count), AutoTokenizer.from_pretrained(folder, padding_side="left")
problems = list(task.heldout)


def accuracy(texts):
    return sum(task.score(problem, text) for problem, text in zip(problems, texts)) / len(problems)


model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
inputs = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
inputs.pop("token_type_ids", None)
with torch.no_grad():
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
found = {
    "transformers": accuracy(
        tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )
}

from vllm import LLM, SamplingParams  # noqa: E402

llm = LLM(folder, max_model_len=128, enforce_eager=True)
results = llm.generate(
    [problem.prompt for problem in problems], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False
)
found["vllm"] = accuracy([result.outputs[0].text for result in results])
print(json.dumps(found))
