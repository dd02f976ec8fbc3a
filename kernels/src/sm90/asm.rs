//! Instructions.
use cubecl::prelude::*;

fn registers(first: usize, n: usize) -> String {
    (first..first + n).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ")
}

/// m64n64, both from shared memory.
pub(super) fn scores_text(tiles: usize, ty: &str) -> String {
    let mut s = String::from(
        "{\n.reg .pred pz, po;\n.reg .b64 da, db;\nsetp.ne.b32 pz, 0, 0;\nsetp.eq.b32 po, 0, 0;\nwgmma.fence.sync.aligned;\n",
    );
    for k in 0..4 * tiles {
        let offset = (k / 4) * 512 + (k % 4) * 2;
        s += &format!("add.s64 da, %32, {offset};\nadd.s64 db, %33, {offset};\n");
        let p = if k == 0 { "pz" } else { "po" };
        s += &format!(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.{ty}.{ty} {{{}}}, da, db, {p}, 1, 1, 0, 0;\n",
            registers(0, 32)
        );
    }
    s + "wgmma.commit_group.sync.aligned;\n}\n"
}

/// m64n256, both from shared memory: two groups of half the steps.
pub(super) fn output_text(steps: usize, ty: &str) -> String {
    let mut s = String::from("{\n.reg .pred po;\n.reg .b64 da, db;\nsetp.eq.b32 po, 0, 0;\n");
    for i in 0..128 {
        s += &format!("mov.b32 %{i}, %{};\n", 128 + i);
    }
    s += "wgmma.fence.sync.aligned;\n";
    for k in 0..steps {
        s += &format!("add.s64 da, %256, {};\nadd.s64 db, %257, {};\n", 128 * k, 128 * k);
        s += &format!(
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.{ty}.{ty} {{{}}}, da, db, po, 1, 1, 0, 1;\n",
            registers(0, 128)
        );
        if 2 * (k + 1) == steps {
            s += "wgmma.commit_group.sync.aligned;\n";
        }
    }
    s + "wgmma.commit_group.sync.aligned;\n}\n"
}

fn wait_text(n: usize, pending: usize) -> String {
    let mut s = format!("wgmma.wait_group.sync.aligned {pending};\n");
    for i in 0..n {
        s += &format!("mov.b32 %{i}, %{};\n", n + i);
    }
    s
}

#[cube]
pub(super) fn value_of<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

#[cube]
pub(super) fn wgmma_wait<N: Size>(
    acc: Vector<f32, N>,
    #[comptime] n: usize,
    #[comptime] pending: usize,
) -> Vector<f32, N> {
    let body = comptime!(wait_text(n, pending));
    let out: Vector<f32, N>;
    gpu_asm!("{body} // {d} {c}", d = out(_) out, c = in(_) value_of::<Vector<f32, N>>(acc));
    out
}

#[cube]
pub(super) fn vector_of<T: Scalar, N: Size>(seq: &Sequence<T>) -> Vector<T, N> {
    intrinsic!(|scope| {
        let n: usize = seq.__expand_len_method(scope);
        let vals: Vec<pliron::value::Value> =
            (0..n).map(|i| (*seq.__expand_index_method(scope, i.into())).read_value(scope)).collect();
        let ty = Vector::<T, N>::__expand_as_type(scope);
        let op = cubecl::ir::dialect::vector::CompositeConstructOp::new(scope.ctx_mut(), ty, vals);
        scope.register_with_result(&op).into()
    })
}

#[cube]
pub(super) fn key_descriptor(addr: u32) -> u64 {
    u64::cast_from((addr & 0x3FFFFu32) >> 4u32) | 0x4000_0040_0001_0000u64
}
#[cube]
pub(super) fn value_descriptor(addr: u32) -> u64 {
    u64::cast_from((addr & 0x3FFFFu32) >> 4u32) | 0x4000_0040_0200_0000u64
}
#[cube]
pub(super) fn weight_descriptor(addr: u32) -> u64 {
    u64::cast_from((addr & 0x3FFFFu32) >> 4u32) | 0x0000_0008_0040_0000u64
}
#[cube]
pub(super) fn mbarrier_init(bar: u32, #[comptime] count: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {count};", b = in(_) value_of::<u32>(bar));
}
#[cube]
pub(super) fn fence_mbarrier_init() {
    gpu_asm!("fence.mbarrier_init.release.cluster;\nfence.proxy.async;");
}
#[cube]
pub(super) fn fence_proxy_async() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}
#[cube]
pub(super) fn mbarrier_expect(bar: u32, #[comptime] bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{b}], {bytes};", b = in(_) value_of::<u32>(bar), options(explicit_mem, writes_address_space shared));
}
#[cube]
pub(super) fn mbarrier_arrive(bar: u32) {
    gpu_asm!("mbarrier.arrive.release.cta.shared::cta.b64 _, [{b}];", b = in(_) value_of::<u32>(bar));
}
#[cube]
pub(super) fn mbarrier_arrive_if(bar: u32, zero: u32) {
    gpu_asm!("{{\n.reg .pred p;\nsetp.eq.u32 p, {z}, 0;\n@p mbarrier.arrive.release.cta.shared::cta.b64 _, [{b}];\n}}", z = in(_) value_of::<u32>(zero), b = in(_) value_of::<u32>(bar));
}
#[cube]
pub(super) fn mbarrier_wait(bar: u32, parity: u32) {
    gpu_asm!("{{\n.reg .pred P1;\nLAB_WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 P1, [{b}], {p};\n@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}}",
        b = in(_) value_of::<u32>(bar), p = in(_) value_of::<u32>(parity));
}
#[cube]
pub(super) fn tma_load_3d(smem: u32, map: u64, bar: u32, x: u32, y: u32, z: u32) {
    gpu_asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{m}, {{{x}, {y}, {z}}}], [{b}];",
        s = in(_) value_of::<u32>(smem), m = in(_) value_of::<u64>(map), x = in(_) value_of::<u32>(x), y = in(_) value_of::<u32>(y), z = in(_) value_of::<u32>(z), b = in(_) value_of::<u32>(bar),
        options(explicit_mem, writes_address_space shared));
}
#[cube]
pub(super) fn setmaxnreg_inc(#[comptime] n: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {n};", options(nomem));
}
#[cube]
pub(super) fn setmaxnreg_dec(#[comptime] n: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {n};", options(nomem));
}
#[cube]
pub(super) fn warp_uniform(x: u32) -> u32 {
    let out: u32;
    gpu_asm!("shfl.sync.idx.b32 {d}, {x}, 0, 31, 0xffffffff;", d = out(_) out, x = in(_) value_of::<u32>(x), options(pure, nomem));
    out
}
#[cube]
pub(super) fn next(t: u32) -> u32 {
    let out: u32;
    gpu_asm!("add.u32 {o}, {i}, 1;", o = out(_) out, i = in(_) value_of::<u32>(t), options(nomem));
    out
}
#[cube]
pub(super) fn ex2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {d}, {a};", d = out(_) out, a = in(_) value_of::<f32>(x), options(pure, nomem));
    out
}
#[cube]
pub(super) fn pack(lo: f32, hi: f32, #[comptime] bf16: bool) -> u32 {
    let ty = comptime!(if bf16 { "bf16x2" } else { "f16x2" });
    let out: u32;
    gpu_asm!("cvt.rn.{ty}.f32 {d}, {h}, {l};", d = out(_) out, h = in(_) value_of::<f32>(hi), l = in(_) value_of::<f32>(lo), options(pure, nomem));
    out
}
#[cube]
pub(super) fn barrier_sync(#[comptime] id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {id}, {units};");
}
#[cube]
pub(super) fn wgmma_wait_for(#[comptime] pending: usize) {
    gpu_asm!("wgmma.wait_group.sync.aligned {pending};");
}
#[cube]
pub(super) fn mbarrier_expect_bytes(bar: u32, #[comptime] bytes: u32) {
    gpu_asm!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{b}], {bytes};", b = in(_) value_of::<u32>(bar));
}
