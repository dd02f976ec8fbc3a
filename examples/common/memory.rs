//! How much memory a device has, where that can be known.

use std::process::Command;

use burn_mla::ops::{DeviceMemory, DeviceName, host_memory};

/// The memory of a device: of this machine (Linux), or what `nvidia-smi` says of the GPU.
pub fn of(device: DeviceName) -> Option<DeviceMemory> {
    match device {
        DeviceName::Flex => host_memory(),
        DeviceName::Cuda(index) => {
            let query = ["--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits", "-i"];
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let output = Command::new("nvidia-smi").args(query).arg(gpu(index, visible.as_deref())?).output().ok()?;
            parse_nvidia_smi(&String::from_utf8(output.stdout).ok()?)
        }
        DeviceName::Wgpu => None,
    }
}

/// What `nvidia-smi` calls the GPU that CUDA gives this number.
fn gpu(index: usize, visible: Option<&str>) -> Option<String> {
    match visible {
        None => Some(index.to_string()),
        Some(list) => list.split(',').map(str::trim).nth(index).filter(|name| !name.is_empty()).map(str::to_string),
    }
}

fn parse_nvidia_smi(text: &str) -> Option<DeviceMemory> {
    let (total, free) = text.trim().split_once(',')?;
    let megabytes = |text: &str| text.trim().parse::<u64>().ok()?.checked_mul(1 << 20);
    Some(DeviceMemory { total: megabytes(total)?, free: megabytes(free)? })
}
