"""Quantize a model with GPTQModel: by_gptqmodel.py SOURCE RESULT ARGUMENTS, with lists of tokens on standard input."""

import json
import sys

from gptqmodel import GPTQModel, QuantizeConfig

source, result, arguments = sys.argv[1:]
inputs = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in json.load(sys.stdin)]
model = GPTQModel.load(source, QuantizeConfig(**json.loads(arguments)), device="cpu")
model.quantize(inputs, batch_size=1)
model.save(result)
