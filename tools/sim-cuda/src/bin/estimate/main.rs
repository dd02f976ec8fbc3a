//! Estimates the time of decode steps on a GPU from the PTX of the kernels (`ptx_sim::timing`).
//!
//!     estimate [--gpu h200|b200] FOLDER
//!
//! The folder is what the offline compiler of `mla-kernels` leaves with `--out`; `tools/estimate.sh` makes it. The planner
//! runs on the simulator, then the decoding kernel for the CTA, or pair, that has most to do: all of its blocks of keys.
mod around;
mod forms;
mod kernel;
mod launches;
mod merge;
mod shapes;
mod sparse;

use around::around;
use forms::{BLACKWELL_GPU, Gpu, HOPPER_GPU, ROWS};
use kernel::{Failure, Kernel};
use launches::plan;
use shapes::{KEY, SHAPES, Shape, VALUE};
use std::path::Path;
use std::process::ExitCode;

/// Blocks of keys that an item costs beside its own (`mla_plan`, `MAX_SLACK`), to find the cube that takes longest.
const ITEM: usize = 8;
/// How far an estimate may be off.
const TOLERANCE: f64 = 0.25;

/// What a shape takes.
struct Estimate {
    /// Multiprocessors that have work.
    active: usize,
    /// Blocks of 64 keys of the CTA that has most to do.
    blocks: usize,
    cycles: u64,
    /// Part of the time that tensor cores and shared memory are busy.
    tensor: f64,
    shared: f64,
    /// Microseconds of the decoding, and of all.
    decode: f64,
    all: f64,
}

fn estimate(gpu: &Gpu, planner: &Kernel, folder: &Path, shape: &Shape) -> Result<Estimate, Failure> {
    let (form, cubes) = (gpu.form(shape), gpu.cubes(shape));
    let plan = plan(planner, shape, cubes)?;
    let loads = plan.loads(ITEM);
    let (cube, _) = loads.iter().enumerate().max_by_key(|(_, load)| **load).unwrap_or((0, &0));
    let clusters = form.clusters(shape);
    let active = loads.iter().filter(|load| **load > 0).count() * clusters * form.ctas;
    let rates = gpu.rates.shared_by(active, clusters as f64 * form.times);
    let stats = Kernel::load(folder, form.name)?.decode(form, shape, (&plan, cube), &rates)?;
    let decode = rates.microseconds(stats.cycles as f64);
    let busy = |cycles: u64| cycles as f64 / (stats.cycles as f64 * form.ctas as f64);
    Ok(Estimate {
        active,
        blocks: plan.loads(0)[cube],
        cycles: stats.cycles,
        tensor: busy(stats.tensor_cycles),
        shared: busy(stats.shared_cycles),
        decode,
        all: decode + around(folder, shape, (&plan, shape.batch + cubes), gpu.rates)?,
    })
}

/// The least that a shape can take, in microseconds: all products at the full rate of all tensor cores, all keys read once.
fn bounds(gpu: &Gpu, shape: &Shape) -> (f64, f64) {
    let (rates, keys) = (gpu.rates, (shape.batch * shape.keys) as f64);
    let products = keys * shape.rows() as f64 * (KEY + VALUE) as f64;
    let cycles = products / rates.products / f64::from(rates.multiprocessors);
    (rates.microseconds(cycles), keys * KEY as f64 * 2.0 / rates.memory_bandwidth * 1e6)
}

fn run(gpu: &Gpu, folder: &Path) -> Result<bool, Failure> {
    let planner = Kernel::load(folder, "mla_plan.shares.sm_90a")?;
    println!(
        "| b, s_q, h, s_k | CTAs | blocks | cycles per block | tensor cores | shared memory | decode, us | all, us | bound, us | {}",
        if gpu.measured { "measured | error |" } else { "of the products' bound | of the bound |" }
    );
    let mut good = true;
    for shape in &SHAPES {
        let found = estimate(gpu, &planner, folder, shape)?;
        let (tensor, memory) = bounds(gpu, shape);
        let bound = if tensor > memory { format!("{tensor:.1} products") } else { format!("{memory:.1} memory") };
        let judge = if gpu.measured {
            let error = found.all / shape.measured - 1.0;
            good &= !shape.judged || error.abs() <= TOLERANCE;
            let mark = if shape.judged { " *" } else { "" };
            format!("{:.1} | {:+.0} %{mark}", shape.measured, 100.0 * error)
        } else {
            format!("{:.2} | {:.2}", found.all / tensor, found.all / tensor.max(memory))
        };
        println!(
            "| {}, {}, {}, {} | {} | {} | {:.0} | {:.0} % | {:.0} % | {:.1} | {:.1} | {bound} | {judge} |",
            shape.batch,
            shape.queries,
            shape.heads,
            shape.keys,
            found.active,
            found.blocks,
            found.cycles as f64 / found.blocks.max(1) as f64,
            100.0 * found.tensor,
            100.0 * found.shared,
            found.decode,
            found.all,
        );
    }
    if gpu.measured {
        println!("\n*: judged. {} within {:.0} %.", if good { "All are" } else { "Not all are" }, 100.0 * TOLERANCE);
    }
    if !gpu.measured {
        sparse::print(gpu.rates, folder)?;
    }
    println!("Query rows of a CTA: {ROWS}. {}: {} GHz.", gpu.rates.name, gpu.rates.clock_ghz);
    Ok(good)
}

fn main() -> ExitCode {
    let (mut gpu, mut folder) = (Some(HOPPER_GPU), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument != "--gpu" {
            folder = Some(argument);
            continue;
        }
        gpu = match arguments.next().as_deref() {
            Some("h200") => Some(HOPPER_GPU),
            Some("b200") => Some(BLACKWELL_GPU),
            _ => None,
        };
    }
    let (Some(gpu), Some(folder)) = (gpu, folder) else {
        eprintln!("usage: estimate [--gpu h200|b200] FOLDER\nThe folder has the PTX of the kernels.");
        return ExitCode::FAILURE;
    };
    match run(&gpu, Path::new(&folder)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
