//! The simulated GPU: memory, modules, launches. What goes wrong in a launch stays wrong, as on hardware.
use crate::capture::{Captures, Event};
use crate::code::Code;
use crate::config::Config;
use crate::device::Limits;
use crate::graph::{self, Graphs, Node};
use crate::host::Pinned;
use crate::module::{Call, Loaded, Registry};
use crate::peers::{self, Peers};
use crate::record::Recorder;
use crate::report;
use crate::work::{self, Place, Work};
use ptx_sim::{Fault, Launch, Memory, Param, SimError};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What fresh memory holds: NaN in every float type of ours, and as an index out of bounds.
const FRESH: u8 = 0xff;

/// What a GPU has done since the program began.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Counts {
    /// Launches, those of graphs included.
    pub launches: u64,
    /// Copies to the host.
    pub copies_to_host: u64,
}

/// The simulated GPU.
pub struct Gpu {
    /// Its settings.
    pub config: Config,
    /// Its memory.
    pub memory: Memory,
    /// What it has loaded.
    pub registry: Registry,
    /// Events by handle.
    pub events: HashMap<usize, Event>,
    /// Streams that capture.
    pub captures: Captures,
    /// Graphs.
    pub graphs: Graphs,
    /// Pinned memory of the host.
    pub pinned: Pinned,
    /// What it has done.
    pub counts: Counts,
    /// Its number.
    device: usize,
    peers: Arc<Peers>,
    recorder: Option<Recorder>,
    allocated: u64,
    /// Bytes that this program may allocate in all.
    capacity: u64,
    handles: usize,
    failed: Option<Code>,
    reported: HashSet<String>,
}

impl Gpu {
    /// A GPU on which nothing has happened.
    pub fn new(config: Config, device: usize, peers: Arc<Peers>) -> Self {
        let name = format!("ptx-sim sm_{}", config.arch);
        Self {
            recorder: config.trace.clone().map(|trace| Recorder::new(trace, name)),
            device,
            peers,
            capacity: config.memory,
            config,
            memory: Memory::new(),
            registry: Registry::default(),
            events: HashMap::new(),
            captures: Captures::default(),
            graphs: Graphs::default(),
            pinned: Pinned::default(),
            counts: Counts::default(),
            allocated: 0,
            handles: peers::first_handle(device),
            failed: None,
            reported: HashSet::new(),
        }
    }

    /// A handle that is not yet in use.
    pub fn handle(&mut self) -> usize {
        self.handles(1)
    }

    /// The first of so many handles that are not yet in use.
    pub fn handles(&mut self, count: usize) -> usize {
        let first = self.handles + 1;
        self.handles += count;
        first << 4
    }

    /// The event of a handle.
    ///
    /// # Errors
    /// [`Code::InvalidHandle`].
    pub fn event(&self, handle: usize) -> Result<Event, Code> {
        self.events.get(&handle).cloned().ok_or(Code::InvalidHandle)
    }

    /// The error that a launch left behind.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), Code> {
        self.failed.map_or(Ok(()), Err)
    }

    /// Allocates memory.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for no bytes, [`Code::OutOfMemory`] for more than are free.
    pub fn alloc(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(Code::InvalidValue);
        }
        if bytes as u64 > self.free_bytes() {
            return Err(Code::OutOfMemory);
        }
        let buffer = self.memory.alloc_after(self.device as u64, &vec![FRESH; bytes]);
        self.allocated += bytes as u64;
        let address = self.memory.address(buffer);
        self.peers.allocated(self.device, address, self.memory.share(buffer));
        Ok(address)
    }

    /// Frees memory.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] unless the address is one that [`alloc`](Self::alloc) gave.
    pub fn free(&mut self, address: u64) -> Result<(), Code> {
        match self.memory.around(address) {
            Some((buffer, bytes)) if self.memory.address(buffer) == address => {
                self.allocated -= bytes;
                self.memory.free(buffer);
                self.peers.freed(self.device, address);
                Ok(())
            }
            _ => Err(Code::InvalidValue),
        }
    }

    /// Bytes that can be allocated.
    pub fn free_bytes(&self) -> u64 {
        self.capacity.saturating_sub(self.allocated)
    }

    /// Leaves so many bytes free, or as many as there are: the rest is somebody else's, until the next call.
    pub fn leave(&mut self, bytes: u64) {
        self.capacity = self.allocated.saturating_add(bytes).min(self.config.memory);
    }

    /// Loads PTX.
    ///
    /// # Errors
    /// [`Code::InvalidPtx`].
    pub fn load(&mut self, ptx: String) -> Result<usize, Code> {
        let module = Loaded::new(ptx).map_err(|error| {
            eprintln!("sim-cuda: a module does not parse: {error}");
            Code::InvalidPtx
        })?;
        let handle = self.handle();
        self.registry.add_module(handle, module);
        Ok(handle)
    }

    /// Sets the dynamic shared memory that launches of a kernel may have.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] if the device does not have as much.
    pub fn set_dynamic_shared(&mut self, function: usize, bytes: u32) -> Result<(), Code> {
        let most = u64::from(Limits::of(self.config.arch).shared_optin);
        let function = self.registry.function(function)?;
        if u64::from(bytes) + function.static_shared() > most {
            return Err(Code::InvalidValue);
        }
        function.dynamic_shared = bytes;
        Ok(())
    }

    /// Gives a stream work: it runs to its end, or becomes a node if the stream captures.
    ///
    /// # Errors
    /// What the work leaves behind, or what is wrong with it before it runs.
    ///
    /// # Safety
    /// Places of the host have as many bytes as are copied, whenever the work runs.
    pub unsafe fn give(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        if !self.captures.captures(stream)? {
            // SAFETY: the caller vouches for the host's memory.
            return unsafe { self.run(&work) };
        }
        work.check(&self.memory).map_err(|code| self.captures.refuse(stream, code))?;
        self.captures.push(stream, Node::new(work, &self.memory, &self.pinned));
        Ok(())
    }

    /// Allocates memory in the order of a stream. A stream that captures gets a node, and an address that is for its
    /// graph alone.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_async(&mut self, bytes: usize, stream: usize) -> Result<u64, Code> {
        let captures = self.captures.captures(stream)?;
        let address = self.alloc(bytes)?;
        if captures {
            self.captures.push(stream, Node::new(Work::Alloc { address }, &self.memory, &self.pinned));
        }
        Ok(address)
    }

    /// Frees memory in the order of a stream. A stream that captures can only free what its graph allocates.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn free_async(&mut self, address: u64, stream: usize) -> Result<(), Code> {
        if !self.captures.captures(stream)? {
            return self.free(address);
        }
        let nodes = self.captures.nodes(stream);
        let allocated = nodes.iter().any(|node| matches!(node.work, Work::Alloc { address: a } if a == address));
        if !allocated || nodes.iter().any(|node| matches!(node.work, Work::Free { address: a } if a == address)) {
            eprintln!("sim-cuda: memory that its graph has not allocated cannot be freed while a stream captures");
            return Err(self.captures.refuse(stream, Code::InvalidValue));
        }
        self.captures.push(stream, Node::new(Work::Free { address }, &self.memory, &self.pinned));
        Ok(())
    }

    /// Ends the capture of a stream and makes a graph of it.
    ///
    /// # Errors
    /// [`Captures::end`], or why there is no graph.
    pub fn end_capture(&mut self, stream: usize) -> Result<usize, Code> {
        let (nodes, outcome) = self.captures.end(stream)?;
        if let Err(code) = outcome {
            self.free_allocations(&nodes);
            return Err(code);
        }
        let graph = self.handles(Graphs::handles(nodes.len()));
        self.graphs.add(graph, nodes);
        Ok(graph)
    }

    /// Destroys a graph.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is no graph.
    pub fn destroy_graph(&mut self, graph: usize) -> Result<(), Code> {
        let nodes = self.graphs.destroy(graph)?;
        self.free_allocations(&nodes);
        Ok(())
    }

    /// Frees what nodes would have allocated: a graph that does is never run.
    fn free_allocations(&mut self, nodes: &[Node]) {
        for node in nodes {
            if let Work::Alloc { address } = node.work {
                // Nothing else can have freed it.
                let _ = self.free(address);
            }
        }
    }

    /// Runs a graph, node by node.
    ///
    /// # Errors
    /// What a node leaves behind; [`Code::IllegalAddress`], for later calls too, if memory of a node was freed.
    ///
    /// # Safety
    /// Memory of the host that the graph copies is still there, unless it is pinned.
    pub unsafe fn launch_graph(&mut self, executable: usize, stream: usize) -> Result<(), Code> {
        let nodes = self.graphs.executable(executable)?;
        if self.captures.captures(stream)? {
            eprintln!("sim-cuda: graphs as nodes of others are not simulated");
            return Err(self.captures.refuse(stream, Code::NotSupported));
        }
        if let Err(stale) = graph::check(&nodes, &self.memory, &self.pinned) {
            eprintln!("\nsim-cuda: a graph cannot run\n  {stale}");
            self.failed = Some(Code::IllegalAddress);
            return Err(Code::IllegalAddress);
        }
        nodes.iter().enumerate().try_for_each(|(index, node)| {
            // SAFETY: the caller vouches for the host's memory.
            let result = unsafe { self.run(&node.work) };
            result.inspect_err(|_| eprintln!("sim-cuda: that was node {index} of a graph, {}", node.work.name()))
        })
    }

    /// Runs work, to its end.
    ///
    /// # Errors
    /// What the launch leaves behind, or [`Code::InvalidValue`] of a copy that leaves an allocation.
    ///
    /// # Safety
    /// Places of the host have as many bytes as are copied.
    pub unsafe fn run(&mut self, work: &Work) -> Result<(), Code> {
        work.check(&self.memory)?;
        match work {
            Work::Launch(call) => self.launch(call),
            Work::Copy(rows) => {
                self.counts.copies_to_host += u64::from(matches!(rows.to, Place::Host(_)));
                // SAFETY: the caller vouches for the rows.
                unsafe { work::copy(&self.memory, rows) }
            }
            Work::Fill { to, value, bytes } => work::fill(&self.memory, *to, *value, *bytes),
            Work::Alloc { .. } | Work::Free { .. } => Err(Code::NotSupported),
        }
    }

    /// Runs a kernel, to its end.
    ///
    /// # Errors
    /// What the launch would leave behind on hardware; the report is on the standard error output.
    pub fn launch(&mut self, call: &Call) -> Result<(), Code> {
        self.counts.launches += 1;
        let beside = self.peers.beside();
        if beside.is_some() {
            self.memory.borrow_from(self.peers.reachable(self.device));
        }
        let seed = self.seed();
        let Self { memory, recorder, config, .. } = self;
        let read = |range: &ptx_sim::Range| memory.copy_from(range.address, range.bytes);
        let recording = recorder.as_mut().and_then(|recorder| recorder.start(call, memory.ranges(), read));
        let launch = Launch {
            grid: call.grid,
            block: call.block,
            params: call.params.iter().cloned().map(Param::Bytes).collect(),
            dynamic_shared: u64::from(call.dynamic_shared),
            seed,
            adversary: config.adversary,
            beside,
            ..Launch::new(&call.function.module.module, &call.function.entry().name)
        };
        let result = launch.run(memory);
        if let (Some(recorder), Some(recording)) = (recorder, recording) {
            recorder.finish(recording, read);
        }
        memory.give_back();
        result.map(|_| ()).map_err(|error| self.fail(call, &error))
    }

    /// How warps interleave. Of several devices in another way in each launch: in the same one they would wait for each other at the
    /// same places.
    fn seed(&self) -> u64 {
        let salt = (self.counts.launches << 8 | self.device as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if self.peers.beside().is_some() { self.config.seed ^ salt } else { self.config.seed }
    }

    /// Reports an error and keeps it, if hardware would.
    fn fail(&mut self, call: &Call, error: &SimError) -> Code {
        let text = report::text(call, error, &self.config);
        if self.reported.insert(text.clone()) {
            eprintln!("{text}");
        }
        let code = match error.kind {
            Fault::BadLaunch { .. } => return Code::OutOfResources,
            Fault::NoEntry(_) | Fault::UnknownInstruction(_) | Fault::BadOperand { .. } => return Code::InvalidPtx,
            Fault::OutOfBounds { .. } => Code::IllegalAddress,
            Fault::Misaligned { .. } => Code::MisalignedAddress,
            _ => Code::LaunchFailed,
        };
        self.failed = Some(code);
        code
    }
}
