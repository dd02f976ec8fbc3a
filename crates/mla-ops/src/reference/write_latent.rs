use burn::tensor::{Int, Tensor};

use super::host;

/// The cache, written in place: its handle is the only one, so that assigning to a slice copies nothing but the slice.
///
/// `parts`, each `[N, _]`, stand side by side in a cache row.
pub(crate) fn write_latent(cache: Tensor<3>, slots: Tensor<1, Int>, parts: &[Tensor<2>]) -> Tensor<3> {
    let [pages, page_size, width] = cache.dims();
    let mut rows = cache.reshape([pages * page_size, width]);
    for run in runs(&host(slots)) {
        let mut column = 0;
        for part in parts {
            let end = column + part.dims()[1];
            let values = part.clone().narrow(0, run.token, run.len);
            rows = rows.slice_assign([run.slot..run.slot + run.len, column..end], values);
            column = end;
        }
    }
    rows.reshape([pages, page_size, width])
}

/// Neighbouring tokens that go to neighbouring slots.
struct Run {
    token: usize,
    slot: usize,
    len: usize,
}

/// The slots as runs, without the tokens to skip. New tokens of a sequence usually fill page after page.
fn runs(slots: &[i32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (token, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        match runs.last_mut() {
            Some(run) if run.token + run.len == token && run.slot + run.len == slot => run.len += 1,
            _ => runs.push(Run { token, slot, len: 1 }),
        }
    }
    runs
}
