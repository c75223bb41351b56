"""DeepSpeed ZeRO-3, before: deepspeed --num_gpus 2 examples/migrate/deepspeed_before.py

Shown, not tested: it needs DeepSpeed, which graphshard's tests do not install.
"""

import deepspeed
from toy import MICRO, STEPS, Model, loss_of, report, start

device = start()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": MICRO,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
    "zero_optimization": {"stage": 3},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = Model()
engine, _, _, _ = deepspeed.initialize(model=model, config=config)

for step in range(STEPS):
    for micro in range(MICRO):
        # The engine divides by gradient_accumulation_steps itself.
        loss = MICRO * loss_of(engine, MICRO * step + micro, device)
        engine.backward(loss)
        engine.step()
    report(f"loss {step}", loss / MICRO)

engine.save_checkpoint("checkpoint")
