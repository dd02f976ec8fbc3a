//! A small kernel: which mutants it has, and what becomes of them.
use ptx_mutate::{Alteration, Case, Kill, MapEdit, Mutant, Outcome, Reference, Run, Verdict};
use ptx_mutate::{judge, map_mutants, mutants, sample};
use ptx_sim::{Launch, Memory, Param, SimError, TensorElem, TensorMap, TensorSwizzle, parse};

/// Two warps: each copies words to shared memory, then reads those of the other; words past the end are left alone.
const EXCHANGE: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry exchange(.param .u64 in, .param .u64 out, .param .u32 count)
.maxntid 64, 1, 1
{
.shared .align 16 .b8 words[256];
.reg .pred %p<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
ld.param.u32 %r1, [count];
mov.u32 %r2, %tid.x;
mul.wide.u32 %rd3, %r2, 4;
add.s64 %rd4, %rd1, %rd3;
shl.b32 %r3, %r2, 2;
mov.u32 %r4, words;
add.s32 %r5, %r4, %r3;
cp.async.ca.shared.global [%r5], [%rd4], 4;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
xor.b32 %r6, %r5, 128;
ld.shared.u32 %r7, [%r6];
shfl.sync.bfly.b32 %r8, %r7, 1, 31, -1;
setp.ge.u32 %p1, %r2, %r1;
@%p1 bra $done;
add.s64 %rd5, %rd2, %rd3;
st.global.u32 [%rd5], %r8;
$done:
ret;
}
";

struct Exchange(u32);

impl Case for Exchange {
    fn name(&self) -> &str {
        "exchange"
    }

    fn run(&self, run: &Run) -> Result<Outcome, SimError> {
        let mut memory = Memory::new();
        let words: Vec<u8> = (0..64u32).flat_map(|i| (i * 7 + 3).to_le_bytes()).collect();
        let (input, out) = (memory.alloc(&words), memory.alloc(&vec![0; 4 * self.0 as usize]));
        let params = vec![Param::Buffer(input), Param::Buffer(out), Param::Bytes(self.0.to_le_bytes().to_vec())];
        let launch = Launch {
            block: [64, 1, 1],
            params,
            seed: run.seed,
            max_instructions: run.limit,
            coverage: run.coverage,
            ..Launch::new(run.module, "exchange")
        };
        let stats = launch.run(&memory)?;
        let memory = vec![memory.read(input), memory.read(out)];
        Ok(Outcome { memory, instructions: stats.warp_instructions, longest: stats.longest_cta })
    }
}

fn verdicts(text: &str, counts: &[u32]) -> Vec<(Mutant, Verdict)> {
    let module = parse(text).unwrap();
    let seeds = [1, 2, 3, 4];
    let cases: Vec<Exchange> = counts.iter().map(|n| Exchange(*n)).collect();
    let count = module.entries[0].instrs.len();
    let references: Vec<Reference> = cases.iter().map(|c| Reference::new(c, &module, count, &seeds).unwrap()).collect();
    let found = mutants(&module, 0, text);
    found.into_iter().map(|m| (m.clone(), judge(&m, &module, 0, &references, &seeds))).collect()
}

fn killed_by(verdict: &Verdict) -> Option<Kill> {
    if let Verdict::Killed { by, .. } = verdict { Some(*by) } else { None }
}

#[test]
fn ids_are_unique_and_name_line_operator_and_change() {
    let found = mutants(&parse(EXCHANGE).unwrap(), 0, EXCHANGE);
    let ids: Vec<&str> = found.iter().map(|m| m.id.as_str()).collect();
    let expected = [
        "L22 commit removed",
        "L23 wait_group removed",
        "L23 wait_group 0->1",
        "L24 barrier removed",
        "L27 shuffle its own lane",
        "L27 shuffle bounds^31",
        "L27 shuffle members^1",
        "L28 bound setp.ge.u32->setp.gt.u32",
        "L29 branch never taken",
    ];
    assert_eq!(ids, expected);
    assert_eq!(found[8].ptx, "@%p1 bra $done;");
}

#[test]
fn mutants_are_noticed_for_the_right_reason() {
    for (mutant, verdict) in verdicts(EXCHANGE, &[64, 50]) {
        let by = killed_by(&verdict);
        let expected: &[Kill] = match mutant.operator {
            "commit" | "wait_group" => &[Kill::Uninitialised, Kill::Order],
            "barrier" => &[Kill::Uninitialised, Kill::Order],
            "bound" | "branch" => &[Kill::Bounds],
            _ => &[Kill::Result, Kill::Other],
        };
        assert!(by.is_some_and(|by| expected.contains(&by)), "{}: {verdict:?}", mutant.id);
    }
}

/// Without a case whose count is not that of the threads, the bound goes unnoticed.
#[test]
fn cases_decide_what_is_noticed() {
    let survivors = verdicts(EXCHANGE, &[64]).into_iter().filter(|(_, v)| *v == Verdict::Survived);
    let operators: Vec<&str> = survivors.map(|(mutant, _)| mutant.operator).collect();
    assert_eq!(operators, ["bound", "branch"]);
}

/// A label of the instruction that is removed, or behind it, leads where it led.
#[test]
fn labels_move_with_the_instructions() {
    let text = EXCHANGE.replace("bar.sync 0;", "bra $on;\nret;\n$on: bar.sync 0;");
    for (mutant, verdict) in verdicts(&text, &[64, 50]) {
        assert_ne!(verdict, Verdict::Survived, "{}", mutant.id);
    }
}

/// What is altered of tensor memory, and how.
#[test]
fn tensor_memory_is_altered() {
    let text = "
.version 9.0
.target sm_100a
.address_size 64
.visible .entry tensor()
{
.reg .b16 %rs<2>;
.reg .b32 %r<9>;
mov.u32 %r1, %cluster_ctaid.x;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 64;
tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r4];
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r5], %rs1;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, 64;
ret;
}
";
    let found = mutants(&parse(text).unwrap(), 0, text);
    let ids: Vec<&str> = found.iter().map(|m| m.id.as_str()).collect();
    let expected = [
        "L9 rank ^1",
        "L10 columns to 32",
        "L10 columns to 128",
        "L11 allocation removed",
        "L12 tensor_address next column",
        "L12 tensor_address 16 lanes on",
        "L13 commit removed",
        "L13 signal next mbarrier",
        "L13 multicast mask^1",
        "L13 multicast mask^2",
        "L14 allocation removed",
        "L14 columns to 32",
        "L14 columns to 128",
    ];
    assert_eq!(ids, expected);
    let with = |index: usize| -> Vec<String> {
        let Alteration::Code(edit) = &found[index].alteration else { return Vec::new() };
        edit.with.iter().map(|i| format!("{} {:?}", i.opcode, i.operands.last())).collect()
    };
    assert_eq!(with(0), ["mov.u32 Some(Name(\"%cluster_ctaid.x\"))", "xor.b32 Some(Int(1))"]);
    assert_eq!(with(9)[0], "xor.b16 Some(Int(2))");
}

#[test]
fn samples_are_parts_that_the_seed_chooses() {
    let all: Vec<u32> = (0..100).collect();
    let take = |seed| sample(all.clone(), 10, seed, |i| i.to_string());
    assert_eq!(take(1).len(), 10);
    assert_eq!(take(1), take(1));
    assert_ne!(take(1), take(2));
    assert_eq!(sample(all.clone(), 200, 1, |i| i.to_string()), all);
}

/// A box of 8 rows of 32 words goes through shared memory: columns 16 on, rows 12 on, so that parts lie outside.
const BOX: &str = "
.version 8.0
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 out, .param .align 64 .b8 map[128])
.maxntid 32, 1, 1
{
.shared .align 1024 .b8 words[2048];
.shared .align 8 .b8 bar[8];
.reg .pred %p<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
ld.param.u64 %rd1, [out];
mov.b64 %rd2, map;
cvta.param.u64 %rd3, %rd2;
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
mov.b32 %r2, bar;
mov.b32 %r3, words;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r2], 1024;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd3, {16, 12}], [%r2];
bar.warp.sync -1;
$wait:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra $wait;
shl.b32 %r4, %r1, 2;
add.s32 %r5, %r3, %r4;
mul.wide.u32 %rd4, %r1, 4;
add.s64 %rd5, %rd1, %rd4;
mov.b32 %r6, 0;
$row:
ld.shared.u32 %r7, [%r5];
st.global.u32 [%rd5], %r7;
add.s32 %r5, %r5, 128;
add.s64 %rd5, %rd5, 128;
add.s32 %r6, %r6, 1;
setp.lt.u32 %p3, %r6, 8;
@%p3 bra $row;
ret;
}
";

struct Boxed;

impl Boxed {
    const TENSOR: u64 = 0x4_0000_0000;

    /// 16 rows of 32 words.
    fn map() -> TensorMap {
        TensorMap {
            elem: TensorElem::Float(4),
            address: Self::TENSOR,
            dims: vec![32, 16],
            strides: vec![128],
            boxes: vec![32, 8],
            steps: vec![1, 1],
            swizzle: TensorSwizzle::None,
            fill_nan: false,
        }
    }
}

impl Case for Boxed {
    fn name(&self) -> &str {
        "boxed"
    }

    fn maps(&self) -> Vec<(usize, TensorMap)> {
        vec![(1, Self::map())]
    }

    fn run(&self, run: &Run) -> Result<Outcome, SimError> {
        let mut memory = Memory::new();
        let words: Vec<u8> = (0..512u32).flat_map(|i| (i * 7 + 3).to_le_bytes()).collect();
        memory.alloc_at(Self::TENSOR, &words)?;
        let out = memory.alloc(&[0; 1024]);
        let changed = |MapEdit { field, .. }| field.change(&Self::map()).expect("a map");
        let map = run.map.map_or_else(Self::map, changed).encode().expect("a legal map");
        let params = vec![Param::Buffer(out), Param::Bytes(map.to_vec())];
        let launch = Launch { params, seed: run.seed, max_instructions: run.limit, ..Launch::new(run.module, "copy") };
        let stats = launch.run(&memory)?;
        Ok(Outcome {
            memory: vec![memory.read(out)],
            instructions: stats.warp_instructions,
            longest: stats.longest_cta,
        })
    }
}

#[test]
fn changes_of_tensor_maps_are_noticed() {
    let module = parse(BOX).unwrap();
    let references = [Reference::new(&Boxed, &module, module.entries[0].instrs.len(), &[1]).unwrap()];
    let found = map_mutants(&Boxed.maps());
    let changes: Vec<&str> = found.iter().map(|m| m.change.as_str()).collect();
    let expected = [
        "address +16",
        "bounds 0 -1",
        "bounds 0 +1",
        "bounds 1 -1",
        "bounds 1 +1",
        "stride 0 +16",
        "box 0 halved",
        "box 0 doubled",
        "box 1 halved",
        "box 1 doubled",
        "step 1 to 2",
        "element halved",
        "element doubled",
        "swizzle none->128",
        "fill zero->nan",
    ];
    assert_eq!(changes, expected);
    assert_eq!(found[13].id, "map 1 swizzle none->128");
    for mutant in &found {
        assert!(matches!(mutant.alteration, Alteration::Map(edit) if edit.param == 1));
        let verdict = judge(mutant, &module, 0, &references, &[1]);
        assert!(killed_by(&verdict).is_some(), "{}: {verdict:?}", mutant.id);
    }
}
