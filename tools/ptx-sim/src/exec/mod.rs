//! Runs decoded kernels.
mod alu;
mod barriers;
mod copies;
mod cta;
mod descriptor;
mod flights;
mod float;
mod fragment;
mod matrix;
mod mbarriers;
mod mem;
mod order;
mod product;
mod shadow;
mod shared;
mod sync;
mod sync_mbarrier;
mod tcgen05;
mod warp;
mod wgmma;

pub(crate) use cta::{Limits, Setup, orders_ctas, run};
pub(crate) use float::can_convert;
pub(crate) use warp::Geometry;
