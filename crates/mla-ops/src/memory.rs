//! How much memory there is, asked before much of it is taken.

use std::path::{Path, PathBuf};

use burn::tensor::Device;

use crate::independent::is_flex;

/// Bytes of memory that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In all.
    pub total: u64,
    /// Those that a program may still take.
    pub free: u64,
}

/// The memory of a device: for the CPU that of the machine, its swap included, within the limit of the control group (Linux);
/// `None` where that is not known, as it is of GPUs.
pub fn device_memory(device: &Device) -> Option<DeviceMemory> {
    if is_flex(device) { host_memory() } else { None }
}

/// The memory of the machine, its swap included, within the limit of the control group; `None` on others than Linux.
pub fn host_memory() -> Option<DeviceMemory> {
    let machine = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = std::fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_memory(&group_folder(&text)?));
    Some(group.map_or(machine, |group| DeviceMemory {
        total: machine.total.min(group.total),
        free: machine.free.min(group.free),
    }))
}

/// What `/proc/meminfo` says.
fn parse_meminfo(text: &str) -> Option<DeviceMemory> {
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let swap = |name| bytes(name).unwrap_or(0);
    Some(DeviceMemory {
        total: bytes("MemTotal:")?.saturating_add(swap("SwapTotal:")),
        free: bytes("MemAvailable:")?.saturating_add(swap("SwapFree:")),
    })
}

/// Where the limits of this process are, by its `/proc/self/cgroup` (version 2).
fn group_folder(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(path))
}

/// The limit of a control group, where it has one. What its processes keep of files is not counted: it goes when memory is short.
fn group_memory(folder: &Path) -> Option<DeviceMemory> {
    let read = |name| std::fs::read_to_string(folder.join(name)).ok();
    let total = read("memory.max")?.trim().parse::<u64>().ok()?;
    let taken = read("memory.stat")?.lines().find_map(|line| line.strip_prefix("anon ")?.trim().parse::<u64>().ok())?;
    Some(DeviceMemory { total, free: total.saturating_sub(taken) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_counts_and_files_do_not() {
        let text = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\nSwapTotal: 50 kB\nSwapFree:  20 kB\n";
        assert_eq!(parse_meminfo(text), Some(DeviceMemory { total: 1050 << 10, free: 620 << 10 }));
        assert_eq!(parse_meminfo("MemTotal: 1 kB"), None);
        assert_eq!(parse_meminfo("MemTotal: 1 kB\nMemAvailable: 99999999999999999999 kB"), None);
    }

    #[test]
    fn a_control_group_bounds_the_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("memory.max"), "4096\n").expect("written");
        std::fs::write(folder.path().join("memory.stat"), "anon 1000\nfile 3000\n").expect("written");
        assert_eq!(group_memory(folder.path()), Some(DeviceMemory { total: 4096, free: 3096 }));
        std::fs::write(folder.path().join("memory.max"), "max\n").expect("written");
        assert_eq!(group_memory(folder.path()), None);
        assert_eq!(group_folder("1:cpu:/a\n0::/b/c\n"), Some("/sys/fs/cgroup/b/c".into()));
        assert_eq!(group_folder("1:cpu:/a\n"), None);
    }
}
