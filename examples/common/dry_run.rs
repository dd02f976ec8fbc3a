//! What a checkpoint needs, as a table.

use std::fmt::Write;

use burn_mla::model::{CacheSize, Inspection, LoadAs, ModelConfig, ModelError};
use burn_mla::ops::{DeviceMemory, DeviceName};

/// Requests that a cache is needed for.
pub struct Needs {
    /// Tokens of each, its generated ones included.
    pub tokens: Vec<usize>,
    pub page_size: usize,
    /// Whether decode steps are captured.
    pub graphs: bool,
    /// Whether a device is an NVIDIA GPU, where index keys in FP8 may be dequantised.
    pub cuda: bool,
    /// Devices that the model is divided among. Each has all of the cache.
    pub ranks: usize,
}

/// The memory of the device that has the least of it free. Devices that are named several times have it once.
pub fn least_memory(names: &[DeviceName]) -> Option<DeviceMemory> {
    let memory = |name: &DeviceName| {
        let times = names.iter().filter(|other| *other == name).count() as u64;
        name.memory().map(|memory| DeviceMemory { free: memory.free / times, ..memory })
    };
    names.iter().filter_map(memory).min_by_key(|memory| memory.free)
}

/// The weights of a folder by what they are for, the cache, and the memory of the device beside them.
///
/// # Errors
/// A cache that cannot be.
pub fn table(
    inspection: &Inspection,
    load_as: LoadAs,
    needs: &Needs,
    memory: Option<DeviceMemory>,
) -> Result<String, ModelError> {
    let mut text = String::new();
    let mut row = |cells: [&str; 6]| {
        let [name, tensors, parameters, files, device, stored] = cells;
        let line = format!("{name:<20}{tensors:>9}{parameters:>17}{files:>17}{device:>17}  {stored}");
        let _ = writeln!(text, "{}", line.trim_end());
    };
    let on_device = if needs.ranks > 1 { "bytes per rank" } else { "bytes on device" };
    row(["weights", "tensors", "parameters", "bytes in files", on_device, "stored as"]);
    let mut sums = [0; 4];
    for group in &inspection.groups {
        let numbers = [group.tensors as u64, group.parameters, group.file_bytes, group.device_bytes];
        sums = std::array::from_fn(|i| sums[i] + numbers[i]);
        let [a, b, c, d] = numbers.map(|number| number.to_string());
        let stored: Vec<&str> = group.stored_as.iter().map(String::as_str).collect();
        row([group.name, &a, &b, &c, &d, &stored.join(", ")]);
    }
    let [a, b, c, d] = sums.map(|number| number.to_string());
    row(["all weights", &a, &b, &c, &d, ""]);

    let (per_token, cache, captured, scratch) = cache_bytes(&inspection.config, load_as, needs)?;
    let (requests, tokens) = (needs.tokens.len(), needs.tokens.iter().map(|&tokens| tokens as u128).sum::<u128>());
    let needed =
        u128::from(inspection.device_bytes()).saturating_add(cache).saturating_add(captured).saturating_add(scratch);
    let _ = writeln!(text, "\nKV cache per token  {per_token} bytes");
    let _ = writeln!(text, "KV cache            {cache} bytes for {tokens} tokens of {requests} request(s)");
    if needs.graphs {
        let _ = writeln!(text, "captured steps      {captured} bytes at most");
    }
    if scratch > 0 {
        let _ = writeln!(text, "index keys          {scratch} bytes at most, dequantised on Hopper");
    }
    let _ = writeln!(text, "together            {needed} bytes, {:.2} GiB", gib(needed));
    if needs.ranks > 1 {
        let _ = writeln!(text, "                    on each of {} devices", needs.ranks);
    }
    let _ = match memory {
        None => writeln!(text, "device memory       unknown"),
        Some(DeviceMemory { total, free }) => {
            let (total, free) = (u128::from(total), u128::from(free));
            let verdict = if needed <= free { "enough" } else { "NOT ENOUGH" };
            writeln!(text, "device memory       {:.2} GiB, {:.2} GiB of it free: {verdict}", gib(total), gib(free))
        }
    };
    Ok(text)
}

/// Everything that is wrong with the folder.
pub fn problems(inspection: &Inspection) -> Option<String> {
    if inspection.is_sound() {
        return None;
    }
    let mut lines: Vec<String> = inspection.damaged.iter().map(ToString::to_string).collect();
    if !inspection.report.is_empty() {
        lines.push(inspection.report.to_string());
    }
    Some(lines.join("\n"))
}

/// Bytes of a token in all layers, of whole pages and states for all requests, of the steps that are captured for them, and of index keys
/// that are dequantised.
fn cache_bytes(config: &ModelConfig, load_as: LoadAs, needs: &Needs) -> Result<(usize, u128, u128, u128), ModelError> {
    let per_token = config.layers(load_as).iter().map(|layer| layer.bytes_per_token).sum();
    let page_size = needs.page_size;
    let pages = needs.tokens.iter().map(|tokens| tokens.div_ceil(page_size.max(1)));
    let size = CacheSize {
        num_pages: pages.fold(0, usize::saturating_add).max(1),
        page_size,
        max_requests: needs.tokens.len().max(1),
        max_tokens: config.max_position_embeddings(),
    };
    let longest = needs.tokens.iter().max().copied().unwrap_or(0);
    let captured = if needs.graphs { config.captured_bytes(CacheSize { max_tokens: longest, ..size }) } else { 0 };
    let scratch = if needs.cuda { config.index_scratch_bytes(size, load_as)? } else { 0 };
    Ok((per_token, config.cache_bytes(size, load_as)?, captured, scratch))
}

fn gib(bytes: u128) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
