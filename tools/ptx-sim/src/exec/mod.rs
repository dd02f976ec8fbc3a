//! Runs decoded kernels.
mod alu;
mod barriers;
mod convert;
mod copies;
mod cta;
mod descriptor;
mod double;
mod flights;
mod float;
mod fragment;
mod half;
mod integer;
mod lane;
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
pub(crate) use warp::Geometry;
