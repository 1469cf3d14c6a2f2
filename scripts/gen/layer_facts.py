#!/usr/bin/env python3
"""Facts for reference/tests/methods/layers_upstream.rs: the parameters that vLLM's `create_weights` registers.

Requires torch (CPU) and vLLM 0.21.0's Python files (an unpacked wheel is enough: single methods
are extracted and run on meta tensors; the package is not imported).

Usage: layer_facts.py VLLM_DIR reference/tests/data
where VLLM_DIR holds `model_executor/`. Writes layers_moe_facts.txt and layers_linear_facts.txt.
"""
import ast, contextlib, enum, pathlib, sys, types
import torch
if len(sys.argv) != 3:
    sys.exit(__doc__)
R = sys.argv[1].rstrip('/') + '/model_executor/'
OUT = pathlib.Path(sys.argv[2])

def funcs(path, names, cls=None):
    src = open(R + path).read()
    tree = ast.parse(src)
    out = []
    body = tree.body
    if cls:
        body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls][0].body
    for n in body:
        if isinstance(n, ast.FunctionDef) and n.name in names:
            n.decorator_list = []
            n.returns = None
            for a in n.args.args + n.args.kwonlyargs:
                a.annotation = None
            out.append(ast.unparse(n))
    return '\n'.join(out)

class S(enum.Enum):
    TENSOR = 'tensor'
    CHANNEL = 'channel'
    GROUP = 'group'
    BLOCK = 'block'

def set_weight_attrs(p, a):
    if not a:
        return
    for k, v in a.items():
        setattr(p, k, v)

class Layer:

    def __init__(self):
        self.__dict__['P'] = {}

    def register_parameter(self, n, p):
        self.P[n] = p
        self.__dict__[n] = p

class st:
    pass
NS = dict(torch=torch, set_weight_attrs=set_weight_attrs, FusedMoeWeightScaleSupported=S, marlin_make_workspace_new=lambda d, n: None, scalar_types=types.SimpleNamespace(uint4b8='uint4b8', uint8b128='uint8b128'), GPTQMarlinState=types.SimpleNamespace(REPACK=0), init_logger=lambda n: None)

def load(path, cls, names=('create_weights', 'get_weight_shape')):
    ns = dict(NS)
    exec(funcs(path, names, cls), ns)
    return ns
DT = {torch.int32: 'I32', torch.bfloat16: 'BF16', torch.float16: 'F16', torch.float32: 'F32', torch.uint8: 'U8', torch.float8_e4m3fn: 'F8_E4M3', torch.int8: 'I8', torch.int64: 'I64'}
torch.set_default_dtype(torch.bfloat16)

def dump(title, layer, extra=''):
    print('#', title, extra)
    for n, p in layer.P.items():
        qm = getattr(p, 'quant_method', '-')
        qm = getattr(qm, 'value', qm)
        print(n, 'x'.join(map(str, p.shape)) or 'scalar', DT[p.dtype], int(bool(getattr(p, 'is_transposed', False))), qm, int(bool(getattr(p, 'load_full_w2', False))))

def moe():
    g = load('layers/quantization/gptq_marlin.py', 'GPTQMarlinMoEMethod')

    def run(title, ns, self, E, H, I, full=None):
        l = Layer()
        a = {}
        if full is not None:
            a['intermediate_size_full'] = full
        with torch.device('meta'):
            try:
                ns['create_weights'](self, l, E, H, I, torch.bfloat16, **a)
            except Exception as e:
                print('#', title, 'REFUSED', type(e).__name__, str(e)[:60].replace('\n', ' '))
                return
        x = ''
        if hasattr(self, 'is_k_full'):
            x += f' k_full={int(self.is_k_full)}'
        if 'num_groups_w13' in l.__dict__:
            x += f' g13={l.num_groups_w13} g2={l.num_groups_w2}'
        dump(title, l, x)

    class Q:
        pass
    for bits, gs, da, (E, H, I, full) in [(4, 128, False, (4, 256, 256, 512)), (4, 128, True, (4, 256, 256, 512)), (4, 128, True, (4, 256, 512, 512)), (8, 32, True, (2, 128, 128, 256)), (4, -1, False, (2, 256, 128, 256)), (8, 64, False, (3, 384, 192, 192))]:
        q = types.SimpleNamespace(quant_type=types.SimpleNamespace(size_bits=bits), group_size=gs, desc_act=da, pack_factor=32 // bits)
        s = types.SimpleNamespace(quant_config=q, input_dtype=None, quant_type='uint4b8' if bits == 4 else 'uint8b128')
        run(f'gptq bits={bits} group={gs} desc_act={int(da)} E={E} H={H} I={I} full={full}', g, s, E, H, I, full)
    c = load('layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16_marlin.py', 'CompressedTensorsWNA16MarlinMoEMethod')
    for kern, bits, strat, gs, ao, gated, (E, H, I, full) in [('Marlin', 4, 'group', 128, None, True, (4, 256, 256, 512)), ('Marlin', 4, 'group', 128, 'group', True, (4, 256, 256, 512)), ('Marlin', 4, 'group', 128, 'weight', True, (4, 256, 256, 512)), ('Marlin', 8, 'channel', None, None, True, (2, 256, 128, 128)), ('Flashinfer', 4, 'group', 32, None, True, (4, 256, 128, 256)), ('Marlin', 4, 'group', 32, 'group', False, (2, 128, 64, 128)), ('Flashinfer', 4, 'group', 32, None, False, (2, 128, 64, 64))]:
        s = types.SimpleNamespace(kernel_backend=kern, num_bits=bits, packed_factor=32 // bits, strategy=strat, group_size=gs, actorder=ao, moe=types.SimpleNamespace(is_act_and_mul=gated))
        s.get_weight_shape = lambda *a, _s=s, **k: c['get_weight_shape'](_s, *a, **k)
        run(f'wna16 kernel={kern} bits={bits} strategy={strat} group={gs} actorder={ao} gated={int(gated)} E={E} H={H} I={I} full={full}', c, s, E, H, I, full)
    n = load('layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py', 'CompressedTensorsW4A4Nvfp4MoEMethod')
    for gated, (E, H, I) in [(True, (4, 256, 128)), (False, (2, 128, 64))]:
        s = types.SimpleNamespace(group_size=16, moe=types.SimpleNamespace(is_act_and_mul=gated), use_global_sf=False)
        try:
            run(f'nvfp4 gated={int(gated)} E={E} H={H} I={I} full={I}', n, s, E, H, I)
        except Exception as e:
            print(e)
    w = load('layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a8_int8.py', 'CompressedTensorsW4A8Int8MoEMethod')
    for gs, bias, (E, H, I) in [(-1, False, (4, 256, 128)), (32, True, (2, 128, 64))]:
        s = types.SimpleNamespace(group_size=gs, has_bias=bias)
        run(f'w4a8 group={gs} bias={int(bias)} E={E} H={H} I={I} full={I}', w, s, E, H, I)
    QS = types.SimpleNamespace(TENSOR='tensor', CHANNEL='channel', BLOCK='block')
    NS['QuantizationStrategy'] = QS
    for tp, strat, block, static, gated, (E, H, I) in [(1, 'tensor', None, True, True, (4, 256, 128)), (1, 'tensor', None, False, False, (4, 256, 128)), (1, 'channel', None, False, True, (2, 256, 128)), (2, 'block', [128, 128], False, True, (2, 320, 128)), (1, 'block', [64, 128], False, True, (2, 320, 192)), (2, 'block', [64, 128], False, True, (2, 320, 192)), (1, 'block', [128, 128], False, True, (2, 256, 192))]:
        NS['get_tensor_model_parallel_world_size'] = lambda tp=tp: tp
        f = load('layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py', 'CompressedTensorsW8A8Fp8MoEMethod')
        s = types.SimpleNamespace(block_quant=block is not None, weight_block_size=block, weight_quant=types.SimpleNamespace(strategy=strat), static_input_scales=static, moe=types.SimpleNamespace(is_act_and_mul=gated))
        run(f"fp8 tp={tp} strategy={strat} block={('x'.join(map(str, block)) if block else '-')} static={int(static)} gated={int(gated)} E={E} H={H} I={I} full={I * tp}", f, s, E, H, I)

def linear():

    class Pm(torch.nn.Parameter):

        def __new__(cls, data=None, **k):
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data=None, **k):
            self.k = k

    def mk(n):
        return type(n, (Pm,), {})
    ns = dict(NS)
    for n in ['PackedvLLMParameter', 'RowvLLMParameter', 'ChannelQuantScaleParameter', 'PackedColumnParameter', 'GroupQuantScaleParameter', 'BasevLLMParameter', 'ModelWeightParameter']:
        ns[n] = mk(n)
    K = type('MarlinLinearKernel', (), {'__init__': lambda self, *a, **k: None})
    ns.update(MPLinearLayerConfig=lambda **k: types.SimpleNamespace(**k), choose_mp_linear_kernel=lambda c: K, MarlinLinearKernel=K, get_marlin_input_dtype=lambda x: None, logger=types.SimpleNamespace(info=lambda *a: None))
    exec(funcs('layers/quantization/utils/marlin_utils.py', ['marlin_repeat_scales_on_all_ranks', 'marlin_is_k_full']), ns)
    n2 = dict(ns)
    exec(funcs('layers/quantization/gptq_marlin.py', ['create_weights'], 'GPTQMarlinLinearMethod'), n2)
    n3 = dict(ns)
    exec(funcs('layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py', ['create_weights'], 'CompressedTensorsWNA16'), n3)

    def show(title, l, kf):
        print('#', title, f'k_full={int(kf)}')
        for n, p in l.P.items():
            k = p.k
            d = lambda x: '-' if k.get(x) is None else k[x]
            print(n, 'x'.join(map(str, p.shape)), DT[p.dtype], d('input_dim'), d('output_dim'), d('packed_dim'), d('packed_factor'))
    for bits, gs, da, par, tp in [(4, 128, 0, 'col', 1), (4, 128, 0, 'col', 2), (4, 128, 0, 'row', 2), (4, 128, 1, 'row', 2), (4, 128, 1, 'col', 2), (8, -1, 0, 'row', 2), (8, -1, 0, 'col', 2), (4, 32, 1, 'row', 1)]:
        kin, outs = (1024, [512, 256]) if par == 'col' else (1024, [512])
        kp = kin // tp if par == 'row' else kin
        op = [o // tp for o in outs] if par == 'col' else outs
        q = types.SimpleNamespace(quant_type='t', group_size=gs, desc_act=bool(da), pack_factor=32 // bits)
        s = types.SimpleNamespace(quant_config=q, input_dtype=None, _kernel_backends_being_used=set())
        l = Layer()
        n2['create_weights'](s, l, kp, op, kin, sum(outs), torch.float16)
        show(f'gptq bits={bits} group={gs} desc_act={da} par={par} tp={tp}', l, n2['marlin_is_k_full'](bool(da), kp != kin))
        for sym in (1, 0):
            if bits == 8 and (not sym):
                continue
            s = types.SimpleNamespace(group_size=gs, quant_type='t', symmetric=bool(sym), has_g_idx=bool(da), pack_factor=32 // bits, _kernel_backends_being_used=set(), layer_name='')
            l = Layer()
            n3['create_weights'](s, l, sum(outs), kin, op, kp, torch.float16, None)
            show(f'ct bits={bits} group={gs} desc_act={da} par={par} tp={tp} sym={sym}', l, n2['marlin_is_k_full'](bool(da), kp != kin))
for name, produce in [('layers_moe_facts.txt', moe), ('layers_linear_facts.txt', linear)]:
    with open(OUT / name, 'w') as f, contextlib.redirect_stdout(f):
        produce()
