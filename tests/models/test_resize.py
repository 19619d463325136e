"""The matrix path of resize and pooling against torch's own."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segpipe.models import build_model, resize
from segpipe.train.forward import AllHeads, autocast

SIZES = [
    ((1, 1), (3, 5)),
    ((4, 5), (1, 1)),
    ((2, 3), (16, 24)),
    ((5, 7), (33, 49)),
    ((9, 13), (65, 97)),
    ((8, 6), (8, 6)),
]
"""(from, to): from and to one pixel, whole factors, odd sizes, no change."""


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("source", "size"), SIZES)
def test_matrix_resize_is_interpolate_forward_and_backward(
    source: tuple[int, int], size: tuple[int, int], align_corners: bool
) -> None:
    x = torch.randn(2, 3, *source, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, *size, dtype=torch.float64)
    ours = resize.bilinear_matmul(x, size, align_corners=align_corners)
    torchs = F.interpolate(x, size=size, mode="bilinear", align_corners=align_corners)
    (grad,) = torch.autograd.grad((ours * weight).sum(), x)
    (expected,) = torch.autograd.grad((torchs * weight).sum(), x)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6)


def test_control_the_other_align_corners_is_seen() -> None:
    x = torch.randn(1, 2, 5, 7)
    ours = resize.bilinear_matmul(x, (20, 28), align_corners=True)
    assert (ours - F.interpolate(x, size=(20, 28), mode="bilinear")).abs().max() > 1e-2


@pytest.mark.parametrize("align_corners", [False, True])
def test_matrix_resize_in_fp32_within_5e_7(align_corners: bool) -> None:
    x = torch.rand(2, 19, 17, 33)
    ours = resize.bilinear_matmul(x, (136, 264), align_corners=align_corners)
    torchs = F.interpolate(
        x, size=(136, 264), mode="bilinear", align_corners=align_corners
    )
    assert (ours - torchs).abs().max() <= 5e-7


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_a_strided_resize_is_every_nth_pixel_of_the_full_one(
    stride: int, align_corners: bool
) -> None:
    x = torch.randn(2, 3, 5, 7)
    full = resize.bilinear_matmul(x, (33, 49), align_corners=align_corners)
    found = resize.bilinear_matmul(
        x, (33, 49), align_corners=align_corners, stride=stride
    )
    expected = full[..., stride // 2 :: stride, stride // 2 :: stride]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_cuda_path_is_taken_inside_its_context_only_and_never_in_export() -> None:
    x = torch.randn(1, 2, 5, 7)
    as_matmul = resize.bilinear_matmul(x, (33, 49))
    as_interpolate = F.interpolate(x, (33, 49), mode="bilinear")
    assert not torch.equal(as_matmul, as_interpolate)
    with resize.as_on_cuda():
        assert torch.equal(resize.bilinear(x, (33, 49)), as_matmul)
        exported = torch.export.export(Upsample(), (x,))
    assert "upsample_bilinear2d" in str(exported.graph)
    assert torch.equal(resize.bilinear(x, (33, 49)), as_interpolate)


class Upsample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return resize.bilinear(x, (33, 49))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_also_under_autocast(
    dtype: torch.dtype,
) -> None:
    x = torch.randn(1, 4, 9, 13).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = resize.bilinear_matmul(x, (36, 52))
        wide = resize.bilinear_matmul(x.float(), (36, 52))
    assert ours.dtype == dtype
    assert wide.dtype == torch.float32
    torch.testing.assert_close(
        wide,
        F.interpolate(x.float(), size=(36, 52), mode="bilinear"),
        rtol=0,
        atol=1e-6,
    )
    torch.testing.assert_close(ours, wide.to(dtype), rtol=0, atol=0)


def test_matrices_of_inference_mode_serve_a_later_backward() -> None:
    resize._kept.cache_clear()
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    with torch.inference_mode():
        resize.bilinear_matmul(x, (6, 8))
    resize.bilinear_matmul(x, (6, 8)).sum().backward()
    assert x.grad is not None
    assert resize._kept.cache_info().currsize == 2


def test_bilinear_on_a_cpu_is_interpolate() -> None:
    x = torch.randn(1, 2, 5, 7)
    expected = F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True)
    assert torch.equal(resize.bilinear(x, (9, 9), align_corners=True), expected)


@pytest.mark.parametrize("bins", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [(32, 64), (7, 13), (6, 6), (4, 5), (1, 2)])
def test_pooling_is_adaptive_also_where_bins_do_not_divide(
    bins: int, size: tuple[int, int]
) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    ours, torchs = resize.adaptive_avg_pool(x, bins), F.adaptive_avg_pool2d(x, bins)
    weight = torch.randn_like(torchs)
    (grad,) = torch.autograd.grad((ours * weight).sum(), x)
    (expected,) = torch.autograd.grad((torchs * weight).sum(), x)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6)


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return resize.adaptive_avg_pool(x, 3)


@pytest.mark.filterwarnings("ignore")  # dynamo warns of the cache that it leaves out
@pytest.mark.parametrize("strict", [False, True])  # strict: through torch.compile
def test_pooling_survives_export_and_leaves_no_fake_tensor_behind(strict: bool) -> None:
    resize._kept.cache_clear()
    x = torch.randn(1, 2, 7, 10)
    program = torch.export.export(Pool(), (x,), strict=strict)
    assert "segpipe" not in str(program.graph), "no file may need this package"
    exported = program.module()
    torch.testing.assert_close(
        exported(x), F.adaptive_avg_pool2d(x, 3), rtol=0, atol=1e-6
    )
    assert not resize._kept.cache_info().currsize


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_pooling_survives_tracing() -> None:
    x = torch.randn(1, 2, 7, 10)
    traced = torch.jit.trace(Pool(), x)
    assert torch.equal(traced(x), resize.adaptive_avg_pool(x, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pidnet_s", "lraspp"])
def test_a_compiled_network_is_one_graph(name: str) -> None:
    """As on a GPU; a break would cost its fusion, and with `fullgraph` it raises."""
    torch.manual_seed(0)
    net, image = AllHeads(build_model(name, 5)).eval(), torch.rand(2, 3, 64, 96)
    with resize.as_on_cuda():
        compiled = torch.compile(net, dynamic=False, fullgraph=True, backend="eager")
        found, expected = compiled(image), net(image)
    assert found.keys() == expected.keys()
    for head in found:
        assert torch.equal(found[head], expected[head])


@pytest.mark.slow
def test_a_compiled_network_learns_as_an_eager_one() -> None:
    """In one graph, through what makes the graph of a backward; inductor itself takes minutes."""
    torch.manual_seed(0)
    net, image = AllHeads(build_model("fast_scnn", 5)), torch.rand(2, 3, 64, 96)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    found = []
    with resize.as_on_cuda():
        compiled = torch.compile(
            net, dynamic=False, fullgraph=True, backend="aot_eager"
        )
        for forward in (net, compiled):
            net.zero_grad()
            heads = forward(image)
            torch.stack([logits.square().mean() for logits in heads.values()]).sum().backward()  # fmt: skip
            gradients = [value.grad for value in net.parameters()]
            found.append([*heads.values(), *gradients])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("align_corners", [False, True])
def test_a_compiled_resize_is_one_node_with_the_value_of_the_eager_one(
    align_corners: bool, order: torch.memory_format
) -> None:
    """On a GPU the node runs the kernel of eager passes; two products of whole matrices took 2.4 times as long."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 9, dtype=torch.bfloat16)
    x = x.to(memory_format=order).requires_grad_()
    weights, nodes = torch.randn(2, 3, 10, 27), []

    def keep(graph: Any, inputs: Any) -> Any:
        nodes.extend(
            str(node.target) for node in graph.graph.nodes if "call" in node.op
        )
        return graph.forward

    with resize.as_on_cuda():
        way = partial(resize.bilinear, size=(10, 27), align_corners=align_corners)
        compiled = torch.compile(way, dynamic=False, fullgraph=True, backend=keep)
        found = []
        for forward in (way, compiled):
            x.grad = None
            with autocast(torch.device("cpu"), "bf16"):
                out = forward(x)
            (out * weights).sum().backward()
            found.append((out, x.grad))
    assert nodes == ["segpipe.resize.default"]
    for eager, node in zip(*found, strict=True):
        assert torch.equal(eager, node)
        assert eager.stride() == node.stride()
    given = x.detach().float().requires_grad_()
    torch.library.opcheck(
        resize._compiled,
        (given, "bilinear", [5, 9], [10, 27], False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
