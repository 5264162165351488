"""Micro: FFA layer forward+backward in a graph at AlexNet's shapes."""
import sys, time, torch
from fedfa.layers import ffa
from fedfa.layers.ffa import FFA, Drawn
fmt = {"bf16": (torch.bfloat16, torch.channels_last), "fp32": (torch.float32, torch.contiguous_format)}
shapes = [(32,64,31,31),(32,192,15,15),(32,384,15,15),(32,256,15,15),(32,256,7,7)]
for name,(dt,mf) in fmt.items():
    for shape in shapes:
        x = torch.randn(shape, device="cuda").to(dt).to(memory_format=mf).requires_grad_()
        g = torch.randn_like(x)
        layer = FFA(shape[1]).cuda()
        for opened in (True, False):
            layer.drawn = Drawn(torch.tensor(opened, device="cuda"), torch.randn(2, *shape[:2], device="cuda"))
            def step():
                return torch.autograd.grad(layer(x), x, g)
            s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s): step(); step()
            torch.cuda.current_stream().wait_stream(s)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20): step()
            graph.replay(); torch.cuda.synchronize()
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record(); [graph.replay() for _ in range(5)]; b.record(); torch.cuda.synchronize()
            us = a.elapsed_time(b)*10
            mb = x.numel()*x.element_size()/1e6
            print(f"{name} {shape} open={opened}: {us:.1f} us fwd+bwd, {mb:.1f} MB", flush=True)
    from torch.profiler import profile, ProfilerActivity
x = torch.randn(32,64,31,31, device="cuda").bfloat16().to(memory_format=torch.channels_last).requires_grad_()
layer = FFA(64).cuda(); layer.drawn = Drawn(torch.tensor(True, device="cuda"), torch.randn(2,32,64, device="cuda"))
g = torch.randn_like(x)
with profile(activities=[ProfilerActivity.CUDA]) as prof:
    for _ in range(10): torch.autograd.grad(layer(x), x, g)
    torch.cuda.synchronize()
for e in prof.key_averages(): print(e.key[:60], e.count, f"{e.device_time:.2f} us")
