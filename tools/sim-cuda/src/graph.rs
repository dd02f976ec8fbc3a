//! Graphs: work that streams captured, run in the order in which it was given.
use crate::code::Code;
use crate::host::{Pinned, PinnedId};
use crate::work::Work;
use ptx_sim::{Memory, Range};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Distance of the handles of a graph and its nodes.
const STEP: usize = 16;

/// A node: work with its arguments as they were when it was captured, and the memory that these name.
#[derive(Debug, Clone)]
pub struct Node {
    /// The work.
    pub work: Work,
    buffers: Vec<Range>,
    pinned: Vec<PinnedId>,
}

/// A node whose memory is gone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {index} of the graph, {work}: {memory} at {address:#x} was freed after the capture")]
pub struct Stale {
    /// The node, counted from 0 in the order of the capture.
    pub index: usize,
    /// What it is.
    pub work: String,
    /// What was freed.
    pub memory: String,
    /// Where it was.
    pub address: u64,
}

impl Node {
    /// Takes down what memory the work has.
    pub fn new(work: Work, memory: &Memory, pinned: &Pinned) -> Self {
        let buffer = |address: u64| {
            let (buffer, bytes) = memory.around(address)?;
            let start = memory.address(buffer);
            (address - start < bytes).then_some(Range { address: start, bytes })
        };
        let mut buffers: Vec<_> = work.device_addresses().into_iter().filter_map(buffer).collect();
        buffers.dedup();
        let pinned = work.host_addresses().into_iter().filter_map(|address| pinned.around(address)).collect();
        Self { work, buffers, pinned }
    }

    /// The first of its memory that is not there any more: what it was, and where.
    fn freed(&self, memory: &Memory, pinned: &Pinned) -> Option<(String, u64)> {
        let there =
            |range: &&Range| memory.around(range.address).is_some_and(|(b, _)| memory.address(b) == range.address);
        let buffer = self.buffers.iter().find(|range| !there(range));
        let buffer = buffer.map(|range| (format!("the allocation of {} bytes", range.bytes), range.address));
        let host = || self.pinned.iter().find(|id| !pinned.has(**id));
        buffer.or_else(|| host().map(|id| ("pinned memory of the host".to_string(), id.address as u64)))
    }
}

/// Says whether all memory that nodes had when they were captured is still there. Hardware does not look, and uses what
/// now lies there.
///
/// # Errors
/// [`Stale`].
pub fn check(nodes: &[Node], memory: &Memory, pinned: &Pinned) -> Result<(), Stale> {
    let stale = |(index, node): (usize, &Node)| {
        let (memory, address) = node.freed(memory, pinned)?;
        Some(Stale { index, work: node.work.name(), memory, address })
    };
    nodes.iter().enumerate().find_map(stale).map_or(Ok(()), Err)
}

/// The graphs that a program has, and what it has instantiated of them.
#[derive(Debug, Default)]
pub struct Graphs {
    graphs: BTreeMap<usize, Arc<[Node]>>,
    executables: HashMap<usize, Arc<[Node]>>,
}

impl Graphs {
    /// Handles that a graph of so many nodes takes.
    pub fn handles(nodes: usize) -> usize {
        nodes + 1
    }

    /// Adds a graph. Its nodes have the handles behind its own.
    pub fn add(&mut self, handle: usize, nodes: Vec<Node>) {
        self.graphs.insert(handle, nodes.into());
    }

    /// The handles of a graph's nodes.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is no graph.
    pub fn nodes(&self, graph: usize) -> Result<Vec<usize>, Code> {
        let nodes = self.graphs.get(&graph).ok_or(Code::InvalidValue)?;
        Ok((0..nodes.len()).map(|index| graph + STEP * (index + 1)).collect())
    }

    /// The work of a node.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is no node, or one of a graph that was destroyed.
    pub fn work(&self, node: usize) -> Result<&Work, Code> {
        let (graph, nodes) = self.graphs.range(..node).next_back().ok_or(Code::InvalidValue)?;
        let distance = node - graph;
        let found = nodes.get((distance / STEP).wrapping_sub(1)).filter(|_| distance.is_multiple_of(STEP));
        found.map(|node| &node.work).ok_or(Code::InvalidValue)
    }

    /// Makes an executable graph of a graph.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is no graph, [`Code::NotSupported`] of one that allocates.
    pub fn instantiate(&mut self, executable: usize, graph: usize) -> Result<(), Code> {
        let nodes = self.graphs.get(&graph).ok_or(Code::InvalidValue)?;
        if nodes.iter().any(|node| matches!(node.work, Work::Alloc { .. } | Work::Free { .. })) {
            eprintln!("sim-cuda: graphs that allocate memory are not simulated");
            return Err(Code::NotSupported);
        }
        self.executables.insert(executable, nodes.clone());
        Ok(())
    }

    /// What an executable graph runs.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is none.
    pub fn executable(&self, executable: usize) -> Result<Arc<[Node]>, Code> {
        self.executables.get(&executable).cloned().ok_or(Code::InvalidValue)
    }

    /// Destroys a graph. What was instantiated of it stays.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is no graph.
    pub fn destroy(&mut self, graph: usize) -> Result<Arc<[Node]>, Code> {
        self.graphs.remove(&graph).ok_or(Code::InvalidValue)
    }

    /// Destroys an executable graph.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] of what is none.
    pub fn destroy_executable(&mut self, executable: usize) -> Result<(), Code> {
        self.executables.remove(&executable).map(|_| ()).ok_or(Code::InvalidValue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Place;

    #[test]
    fn memory_that_was_freed_is_named_with_its_node() {
        let (mut memory, mut pinned) = (Memory::new(), Pinned::default());
        let [kept, freed] = [64, 96].map(|bytes| memory.alloc(&vec![0; bytes]));
        let (to, address) = (memory.address(kept), memory.address(freed));
        let host = pinned.alloc(8).unwrap();
        let works = [
            Work::copy(Place::host(host), Place::Device(to), 8),
            Work::Fill { to, value: 1, bytes: 64 },
            Work::copy(Place::Device(address + 8), Place::Device(to), 8),
        ];
        let nodes = works.map(|work| Node::new(work, &memory, &pinned));
        assert_eq!(check(&nodes, &memory, &pinned), Ok(()));
        memory.free(freed);
        let error = check(&nodes, &memory, &pinned).unwrap_err().to_string();
        let expected = format!("memcpy: the allocation of 96 bytes at {address:#x} was freed after the capture");
        assert_eq!(error, format!("node 2 of the graph, {expected}"));
        pinned.free(host).unwrap();
        // What lies there now is other memory, even at the same address.
        pinned.alloc(8).unwrap();
        let error = check(&nodes, &memory, &pinned).unwrap_err().to_string();
        assert!(error.starts_with("node 0 of the graph, memcpy: pinned memory of the host"), "{error}");
    }
}
