//! What the control groups of this process leave it of the machine's memory (Linux).

use std::path::{Component, Path};

use super::DeviceMemory;

/// Where a version of control groups keeps its files, and their names.
struct Version {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// In `memory.stat`: what the group and those below it keep of files.
    files: [&'static str; 2],
}

const V1: Version = Version {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    files: ["total_inactive_file ", "total_active_file "],
};

const V2: Version = Version {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    files: ["inactive_file ", "active_file "],
};

/// The least that a group of the process, or one above it, has in all and free, where one has a limit below `most` bytes. `root`
/// is `/`.
pub(super) fn group_memory(root: &Path, most: u64) -> Option<DeviceMemory> {
    // A name that is no text belongs to one group, and the others are to be found.
    let groups = String::from_utf8_lossy(&std::fs::read(root.join("proc/self/cgroup")).ok()?).into_owned();
    let least = |(version, path)| version_memory(root, version, path, most);
    groups.lines().filter_map(group).filter_map(least).reduce(DeviceMemory::least)
}

/// Of a line `number:controllers:path`: whose files say something of memory, and where the process is.
fn group(line: &str) -> Option<(&'static Version, &str)> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let version = match controllers {
        "" => &V2,
        _ if controllers.split(',').any(|name| name == "memory") => &V1,
        _ => return None,
    };
    Some((version, path.trim_start_matches('/')))
}

fn version_memory(root: &Path, version: &Version, path: &str, most: u64) -> Option<DeviceMemory> {
    let path = Path::new(path);
    // In a container the path may be that outside of it, or lead out of it (`..`): what is mounted is the container's own group.
    let inside = path.components().all(|part| matches!(part, Component::Normal(_)));
    let path = if inside { path } else { Path::new("") };
    let folders = path.ancestors().map(|group| root.join(version.mount).join(group));
    folders.filter_map(|folder| folder_memory(&folder, version, most)).reduce(DeviceMemory::least)
}

/// What a group has, where it has such a limit: version 1 has always one, mostly above any memory. What its processes keep of files
/// is not counted: it goes when memory is short.
fn folder_memory(folder: &Path, version: &Version, most: u64) -> Option<DeviceMemory> {
    let read = |name| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let total = number(version.limit).filter(|&limit| limit < most)?;
    let stat = read("memory.stat").unwrap_or_default();
    let field = |name| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let files = version.files.into_iter().filter_map(field).fold(0, u64::saturating_add);
    let taken = number(version.usage).unwrap_or(0).saturating_sub(files);
    Some(DeviceMemory { total, free: total.saturating_sub(taken) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a file in a folder")).expect("a folder");
            std::fs::write(path, text).expect("written");
        }
        root
    }

    fn memory_of(files: &[(&str, &str)]) -> Option<[u64; 2]> {
        group_memory(root(files).path(), 1 << 20).map(|DeviceMemory { total, free }| [total, free])
    }

    /// The least of each, which need not be of one group.
    #[test]
    fn a_group_has_no_more_than_those_above_it() {
        let files = [
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("sys/fs/cgroup/pod/container/memory.max", "4096\n"),
            ("sys/fs/cgroup/pod/container/memory.current", "3000\n"),
            ("sys/fs/cgroup/pod/container/memory.stat", "anon 1000\ninactive_file 500\nactive_file 1500\n"),
            ("sys/fs/cgroup/pod/memory.max", "8192\n"),
            ("sys/fs/cgroup/pod/memory.current", "8000\n"),
            ("sys/fs/cgroup/pod/memory.stat", "inactive_file 8\n"),
        ];
        assert_eq!(memory_of(&files), Some([4096, 200]));
        assert_eq!(memory_of(&files[..4]), Some([4096, 3096]));
        assert_eq!(memory_of(&files[..1]), None);
    }

    #[test]
    fn a_group_without_a_limit_has_those_above_it() {
        let files = [
            ("proc/self/cgroup", "0::/user.slice/session\n"),
            ("sys/fs/cgroup/user.slice/session/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/session/memory.current", "100\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "1000\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "400\n"),
        ];
        assert_eq!(memory_of(&files), Some([1000, 600]));
        assert_eq!(memory_of(&files[..3]), None);
    }

    /// The path is that outside of the container, or none: its group is what is mounted.
    #[test]
    fn a_container_is_what_is_mounted() {
        let at = |path| [("proc/self/cgroup", path), ("sys/fs/cgroup/memory.max", "1000\n")];
        for path in ["0::/\n", "0::/system.slice/docker-1.scope\n", "0::/../other\n"] {
            assert_eq!(memory_of(&at(path)), Some([1000, 1000]), "{path}");
        }
        let files = [
            ("proc/self/cgroup", "4:memory:/docker/1\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n"),
        ];
        assert_eq!(memory_of(&files), Some([1000, 900]));
    }

    #[test]
    fn version_1() {
        let files = [
            ("proc/self/cgroup", "9:name=systemd:/a\n4:cpu,memory:/a:b/c\n1:cpuset:/d\n"),
            ("sys/fs/cgroup/memory/a:b/c/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a:b/c/memory.usage_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/a:b/memory.limit_in_bytes", "2000\n"),
            ("sys/fs/cgroup/memory/a:b/memory.usage_in_bytes", "900\n"),
            (
                "sys/fs/cgroup/memory/a:b/memory.stat",
                "inactive_file 5\ntotal_inactive_file 100\ntotal_active_file 50\n",
            ),
        ];
        assert_eq!(memory_of(&files), Some([2000, 1250]));
        // Both versions at once, where only one of them has to do with memory.
        let lines = ("proc/self/cgroup", "4:memory:/a:b\n0::/a:b\n");
        assert_eq!(memory_of(&[lines, files[3]]), Some([2000, 2000]));
    }

    #[test]
    fn rubbish_is_no_limit() {
        let lines = ("proc/self/cgroup", "0::/a\n");
        for limit in ["", "\n", "-1\n", "many\n", "99999999999999999999\n", "1 2\n", "1048576\n"] {
            assert_eq!(memory_of(&[lines, ("sys/fs/cgroup/a/memory.max", limit)]), None, "{limit:?}");
        }
        for lines in ["", "\n", "memory\n", "0:/a\n", "4:memory\n", "::::\n"] {
            assert_eq!(
                memory_of(&[("proc/self/cgroup", lines), ("sys/fs/cgroup/a/memory.max", "1")]),
                None,
                "{lines:?}"
            );
        }
        assert_eq!(memory_of(&[]), None);
        // What is taken is not known, or more than there is.
        let limit = ("sys/fs/cgroup/a/memory.max", "1000\n");
        let taken = |usage, stat| {
            let usage = ("sys/fs/cgroup/a/memory.current", usage);
            memory_of(&[lines, limit, usage, ("sys/fs/cgroup/a/memory.stat", stat)])
        };
        assert_eq!(taken("some\n", ""), Some([1000, 1000]));
        assert_eq!(taken("1200\n", "active_file\ninactive_file x\n"), Some([1000, 0]));
        assert_eq!(taken("600\n", "active_file 18446744073709551615\ninactive_file 9\n"), Some([1000, 1000]));
        assert_eq!(taken("600\n", "anon 500\nworkingset_active_file 7\n"), Some([1000, 400]));
    }

    #[test]
    fn a_name_that_is_no_text_hides_no_other() {
        let root = root(&[("sys/fs/cgroup/memory.max", "1000\n"), ("proc/self/cgroup", "")]);
        std::fs::write(root.path().join("proc/self/cgroup"), b"7:cpu:/\xff\n0::/\xfe\n").expect("written");
        assert_eq!(group_memory(root.path(), 1 << 20), Some(DeviceMemory { total: 1000, free: 1000 }));
    }
}
