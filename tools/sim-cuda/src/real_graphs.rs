//! What streams of a real driver have captured, and the graphs made of it.
use crate::module::Call;
use crate::work::Work;
use std::collections::HashMap;
use std::sync::Arc;

/// Work as the driver got it.
#[derive(Debug)]
pub struct Issue {
    /// The work; tensor maps are the simulator's.
    pub work: Work,
    /// Of a launch the driver's handle of the kernel, and the parameters with its own tensor maps.
    pub launch: Option<(usize, Vec<Vec<u8>>)>,
}

impl Issue {
    /// Work that is no launch.
    pub fn new(work: Work) -> Self {
        Self { work, launch: None }
    }

    /// The launch, if it is one.
    pub fn call(&self) -> Option<&Call> {
        if let Work::Launch(call) = &self.work { Some(call) } else { None }
    }
}

/// What a stream has captured.
#[derive(Debug, Default)]
pub struct Captured {
    /// In the order in which it was given.
    pub issues: Vec<Issue>,
    /// There was unknown work.
    pub partial: bool,
}

/// The driver's captures and graphs.
#[derive(Debug, Default)]
pub struct RealGraphs {
    captures: HashMap<usize, Captured>,
    graphs: HashMap<usize, Arc<Captured>>,
    executables: HashMap<usize, Arc<Captured>>,
}

impl RealGraphs {
    /// Whether a stream captures: launches do not run yet, and copies of memory would end it.
    pub fn capturing(&self) -> bool {
        !self.captures.is_empty()
    }

    /// A capture has begun.
    pub fn begun(&mut self, stream: usize) {
        self.captures.insert(stream, Captured::default());
    }

    /// A capture has ended, with a graph if all went well.
    pub fn ended(&mut self, stream: usize, graph: Option<usize>) {
        let captured = self.captures.remove(&stream);
        if let (Some(captured), Some(graph)) = (captured, graph) {
            self.graphs.insert(graph, Arc::new(captured));
        }
    }

    /// A graph was instantiated.
    pub fn instantiated(&mut self, executable: usize, graph: usize) {
        if let Some(captured) = self.graphs.get(&graph) {
            self.executables.insert(executable, captured.clone());
        }
    }

    /// A graph or an executable graph is destroyed.
    pub fn destroyed(&mut self, handle: usize) {
        self.graphs.remove(&handle);
        self.executables.remove(&handle);
    }

    /// What an executable graph was captured from.
    pub fn executable(&self, executable: usize) -> Option<Arc<Captured>> {
        self.executables.get(&executable).cloned()
    }

    /// A stream that captures has taken work. None: work that is not known.
    pub fn issued(&mut self, issue: Option<Issue>) {
        // Of several captures it is not known which one got it.
        let partial = issue.is_none() || self.captures.len() > 1;
        for captured in self.captures.values_mut() {
            captured.partial |= partial;
        }
        if let (Some(captured), Some(issue)) = (self.captures.values_mut().next(), issue) {
            captured.issues.push(issue);
        }
    }
}
