//! Settings: environment variables.
use ptx_sim::Adversary;
use std::path::PathBuf;

/// Settings of the simulated device and of recording.
#[derive(Debug, Clone)]
pub struct Config {
    /// `SIM_CUDA_ARCH`: compute capability, 75, 80, 90 or 100.
    pub arch: u32,
    /// `SIM_CUDA_DEVICES`: devices that there are, all of them alike.
    pub devices: usize,
    /// `SIM_CUDA_SMS`: multiprocessors that the device says it has.
    pub multiprocessors: u32,
    /// `SIM_CUDA_MEMORY_MIB`: bytes of memory that the device has; pages are taken from the machine as they are allocated.
    pub memory: u64,
    /// `SIM_CUDA_FULL`: whether others have all of that memory, so that no context can be made.
    pub full: bool,
    /// `SIM_CUDA_SEED`: how warps interleave.
    pub seed: u64,
    /// `SIM_CUDA_ADVERSARY`: what launches do that hardware may do but rarely does.
    pub adversary: Adversary,
    /// `SIM_CUDA_FORWARD`: a driver that gets all calls instead of the simulator.
    pub forward: Option<PathBuf>,
    /// Recording, if `SIM_CUDA_TRACE` is set.
    pub trace: Option<TraceConfig>,
}

/// What is recorded.
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// `SIM_CUDA_TRACE`: the folder.
    pub folder: PathBuf,
    /// `SIM_CUDA_TRACE_FILTER`: comma-separated parts of kernels' names; empty: all.
    pub filter: Vec<String>,
    /// `SIM_CUDA_TRACE_LAUNCHES`: launches of each kernel (a kernel of another module counts anew).
    pub launches: u64,
    /// `SIM_CUDA_TRACE_LAUNCH_MIB`: most memory that a launch may use to be recorded.
    pub launch_bytes: u64,
    /// `SIM_CUDA_TRACE_TOTAL_MIB`: most bytes that are written in all.
    pub total_bytes: u64,
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// The variable that has a value that cannot be.
    pub fn from_env() -> Result<Self, String> {
        Self::from(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str, default: u64| match get(name) {
            Some(value) => value.parse().map_err(|_| format!("{name} is {value:?}, expected a number")),
            None => Ok(default),
        };
        let arch = number("SIM_CUDA_ARCH", 90)?;
        if ![75, 80, 90, 100].contains(&arch) {
            return Err(format!("SIM_CUDA_ARCH is {arch}, expected 75, 80, 90 or 100"));
        }
        let multiprocessors = number("SIM_CUDA_SMS", 4)?;
        if !(1..=1024).contains(&multiprocessors) {
            return Err(format!("SIM_CUDA_SMS is {multiprocessors}, expected 1 to 1024"));
        }
        let devices = number("SIM_CUDA_DEVICES", 1)?;
        if !(1..=8).contains(&devices) {
            return Err(format!("SIM_CUDA_DEVICES is {devices}, expected 1 to 8"));
        }
        let mebibytes = number("SIM_CUDA_MEMORY_MIB", 16 << 10)?;
        if !(1..=1 << 20).contains(&mebibytes) {
            return Err(format!("SIM_CUDA_MEMORY_MIB is {mebibytes}, expected 1 to {}", 1 << 20));
        }
        let full = number("SIM_CUDA_FULL", 0)?;
        if full > 1 {
            return Err(format!("SIM_CUDA_FULL is {full}, expected 0 or 1"));
        }
        let adversary = get("SIM_CUDA_ADVERSARY").unwrap_or_default();
        let filter = get("SIM_CUDA_TRACE_FILTER").unwrap_or_default();
        let trace = |folder: String| -> Result<_, String> {
            Ok(TraceConfig {
                folder: folder.into(),
                filter: filter.split(',').filter(|part| !part.is_empty()).map(str::to_string).collect(),
                launches: number("SIM_CUDA_TRACE_LAUNCHES", 4)?,
                launch_bytes: number("SIM_CUDA_TRACE_LAUNCH_MIB", 4)? << 20,
                total_bytes: number("SIM_CUDA_TRACE_TOTAL_MIB", 300)? << 20,
            })
        };
        Ok(Self {
            arch: arch as u32,
            devices: devices as usize,
            multiprocessors: multiprocessors as u32,
            memory: mebibytes << 20,
            full: full == 1,
            seed: number("SIM_CUDA_SEED", 1)?,
            adversary: adversary.parse().map_err(|error| format!("SIM_CUDA_ADVERSARY has {error}"))?,
            forward: get("SIM_CUDA_FORWARD").map(PathBuf::from),
            trace: get("SIM_CUDA_TRACE").map(trace).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<Config, String> {
        Config::from(&|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn the_default_is_a_small_hopper() {
        let config = config(&[]).unwrap();
        assert_eq!((config.arch, config.multiprocessors, config.seed, config.devices), (90, 4, 1, 1));
        assert_eq!((config.memory, config.full), (16 << 30, false));
        assert_eq!(config.adversary, Adversary::default());
        assert!(config.forward.is_none() && config.trace.is_none());
    }

    #[test]
    fn values_that_cannot_be_are_named() {
        for (name, value) in [
            ("SIM_CUDA_ARCH", "89"),
            ("SIM_CUDA_DEVICES", "0"),
            ("SIM_CUDA_SMS", "0"),
            ("SIM_CUDA_MEMORY_MIB", "0"),
            ("SIM_CUDA_FULL", "2"),
            ("SIM_CUDA_SEED", "x"),
            ("SIM_CUDA_ADVERSARY", "lane"),
        ] {
            let error = config(&[(name, value)]).unwrap_err();
            assert!(error.starts_with(name) && error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn the_adversary_has_parts() {
        let adversary = |text| config(&[("SIM_CUDA_ADVERSARY", text)]).unwrap().adversary;
        assert_eq!(adversary("all"), Adversary::ALL);
        assert_eq!(adversary("waits,arrivals"), Adversary { waits: true, arrivals: true, ..Adversary::default() });
    }

    #[test]
    fn traces_have_a_filter_and_limits() {
        let trace = config(&[
            ("SIM_CUDA_TRACE", "t"),
            ("SIM_CUDA_TRACE_FILTER", "merge,page"),
            ("SIM_CUDA_TRACE_LAUNCH_MIB", "2"),
        ]);
        let trace = trace.unwrap().trace.unwrap();
        assert_eq!(trace.filter, ["merge", "page"]);
        assert_eq!((trace.launches, trace.launch_bytes, trace.total_bytes), (4, 2 << 20, 300 << 20));
    }
}
