//! Runs decoded kernels.
mod alu;
mod barriers;
mod copies;
mod cta;
mod descriptor;
mod float;
mod fragment;
mod matrix;
mod mem;
mod product;
mod sync;
mod warp;
mod wgmma;

pub(crate) use cta::{Limits, Setup, orders_ctas, run};
pub(crate) use float::can_convert;
pub(crate) use warp::Geometry;
