//! How much memory a device has, where that can be known.

use std::process::Command;

use burn_mla::ops::DeviceName;

/// Bytes of memory, in all and free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
}

/// The memory of a device: of this machine (Linux), or what `nvidia-smi` says of the GPU.
pub fn of(device: DeviceName) -> Option<Memory> {
    match device {
        DeviceName::Flex => parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?),
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

fn parse_meminfo(text: &str) -> Option<Memory> {
    let kilobytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some(Memory { total: kilobytes("MemTotal:")? << 10, free: kilobytes("MemAvailable:")? << 10 })
}

fn parse_nvidia_smi(text: &str) -> Option<Memory> {
    let (total, free) = text.trim().split_once(',')?;
    let megabytes = |text: &str| Some(text.trim().parse::<u64>().ok()? << 20);
    Some(Memory { total: megabytes(total)?, free: megabytes(free)? })
}
