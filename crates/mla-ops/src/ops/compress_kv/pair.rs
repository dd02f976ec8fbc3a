//! [`compress_kv_pair`]: two compressors in a launch.

use burn::backend::Dispatch;

use super::backend::CompressKvBackend;
use super::{CompressKvArgs, CompressKvError, CompressKvOptions, CompressedKv};

/// [`compress_kv`](crate::compress_kv()) of two compressors, which have states and caches of their own, as a layer with an indexer has them: the same bits. On a
/// GPU a decode step of both is one launch.
///
/// # Errors
/// As [`compress_kv`](crate::compress_kv()), of either: both come back unchanged, with the same error.
pub fn compress_kv_pair(
    calls: [(CompressKvArgs, &CompressKvOptions); 2],
) -> Result<[CompressedKv; 2], Box<[CompressKvError; 2]>> {
    if let Some(error) = calls.iter().find_map(|(args, options)| args.check_call(options).err()) {
        return Err(Box::new(calls.map(|(args, _)| args.refuse(error.clone()))));
    }
    if !calls.iter().all(|(args, _)| args.is_step()) {
        return Ok(calls.map(|(args, options)| args.compress(options)));
    }
    let [(first, quantised), (second, second_quantised)] = calls.map(|(args, options)| args.into_step(options));
    let (first, second) = Dispatch::compress_and_write_pair(first, second);
    Ok([CompressedKv::of_step(first, quantised), CompressedKv::of_step(second, second_quantised)])
}
