//! The operators: which instructions they take, and what becomes of them.
mod bounds;
mod descriptors;
mod flow;
mod maps;
mod order;
mod tcgen05;
mod tensors;
mod warps;

use crate::site::{Change, Site};

pub use maps::MapField;

/// All changes of an instruction.
pub(crate) fn all(site: &Site) -> Vec<Change> {
    let parts = site.parts();
    let mut changes = Vec::new();
    order::fences(site, &parts, &mut changes);
    order::groups(site, &parts, &mut changes);
    order::barriers(site, &parts, &mut changes);
    order::mbarriers(site, &parts, &mut changes);
    tensors::copies(site, &parts, &mut changes);
    tensors::clusters(site, &parts, &mut changes);
    descriptors::matrices(site, &parts, &mut changes);
    tcgen05::tensor_memory(site, &parts, &mut changes);
    warps::warps(site, &parts, &mut changes);
    bounds::bounds(site, &parts, &mut changes);
    changes
}
