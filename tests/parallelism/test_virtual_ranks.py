"""scratch"""
import hashlib, os, pytest, torch
from ranks import run_ranks
from train_states import compose_config, build, run_loop, flat_weights
from ddp_runner.parallelism.shards import full_tensor
from ddp_runner.train.buffers import find_changing

def sha(env, config, steps):
    torch.set_num_threads(config.train.num_threads)
    state = build(env, config)
    find_changing(state)
    trace = run_loop(env, config, max_steps=steps, state=state)
    h = hashlib.sha256()
    for name, v in state.module.state_dict().items():
        h.update(full_tensor(v).detach().contiguous().numpy().tobytes())
    lines = [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in trace.lines]
    return h.hexdigest()[:10], trace.error, lines[-2:], len(trace.lines)

MODES = [("single",1),("ddp",2),("ddp",4),("ddp",8),("fsdp",2),("fsdp",4),("fsdp",8),("hsdp",4),("hsdp",8),("dp",1)]
@pytest.mark.parametrize("keys", [k.split() for k in os.environ["VR"].split(";")])
def test_it(keys):
    modes = MODES if "ALLM" in os.environ else [("single",1),("ddp",2),("fsdp",4),("hsdp",4),("ddp",8)]
    out = {}
    for mode, w in modes:
        config = compose_config("batch.virtual_ranks=8", f"parallelism={mode}", *keys, world_size=w)
        out[mode, w] = run_ranks(sha, w, config, int(os.environ.get("STEPS", 6)))[0]
        print(mode, w, out[mode, w][:2], out[mode,w][2], flush=True)
    assert len({str(v) for v in out.values()}) == 1
