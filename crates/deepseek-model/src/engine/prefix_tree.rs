//! Which pages hold the rows of which tokens, for requests that begin alike.

use std::collections::{BTreeSet, HashMap};

/// A radix tree over token sequences whose digit is a page of tokens: a node is a page, and the path to it the tokens whose
/// rows that page and those before it hold.
///
/// The tree is a holder of its pages beside the requests that use them; the caller counts (`retain`, `release`). Pages leave
/// it from the ends of the paths, those first that were not looked up for the longest time.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_size: usize,
    nodes: Vec<Option<Node>>,
    /// Places in `nodes` that are free.
    vacant: Vec<usize>,
    roots: HashMap<Box<[u32]>, usize>,
    /// Nodes without children by the time of their last use.
    leaves: BTreeSet<(u64, usize)>,
    /// Counts the look-ups.
    clock: u64,
    /// Counts the nodes that there have been.
    births: u64,
    /// Pages of tokens that were looked for.
    #[cfg(test)]
    pub(crate) compared: std::cell::Cell<usize>,
}

/// How far into a tree some tokens were found. The next look-up of the same tokens, or of more behind them, goes on from there: only
/// what came since is compared.
#[derive(Debug, Default)]
pub(crate) struct Found(Vec<Place>);

impl Found {
    /// Forgets what is behind so many pages: a request begins with those, and has others of its own behind them.
    pub(crate) fn truncate(&mut self, pages: usize) {
        self.0.truncate(pages);
    }
}

/// A node, and its [`Node::birth`]: another page may have taken its place.
#[derive(Debug, Clone, Copy)]
struct Place {
    id: usize,
    birth: u64,
}

#[derive(Debug)]
struct Node {
    birth: u64,
    page: u32,
    tokens: Box<[u32]>,
    parent: Option<usize>,
    children: HashMap<Box<[u32]>, usize>,
    used: u64,
}

impl PrefixTree {
    pub(crate) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            births: 0,
            #[cfg(test)]
            compared: Default::default(),
        }
    }

    /// Pages in the tree.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// The pages of the longest beginning of `tokens` that is in the tree. What `found` says of them is known, and kept up to date.
    pub(crate) fn longest_prefix(&mut self, tokens: &[u32], found: &mut Found) -> Vec<u32> {
        self.clock += 1;
        self.revisit(found);
        let mut parent = found.0.last().map(|place| place.id);
        for digit in tokens.chunks_exact(self.page_size).skip(found.0.len()) {
            let Some(id) = self.child(parent, digit) else {
                break;
            };
            self.touch(id);
            self.note(id, found);
            parent = Some(id);
        }
        found.0.iter().filter_map(|place| self.nodes[place.id].as_ref()).map(|node| node.page).collect()
    }

    /// Takes in the whole pages of `tokens`, whose rows are in `pages`. Returns the pages that are new to the tree: where it
    /// has another page for the same tokens, it keeps that.
    ///
    /// Of a request that `runs`, pages after such a one are left out: below another page than its own, a page in use would
    /// keep that one from being evicted. So all pages before one that is in use are in use, too.
    pub(crate) fn insert(&mut self, tokens: &[u32], found: &mut Found, pages: &[u32], runs: bool) -> Vec<u32> {
        self.clock += 1;
        self.revisit(found);
        let mut added = Vec::new();
        let mut parent = found.0.last().map(|place| place.id);
        for (digit, &page) in tokens.chunks_exact(self.page_size).zip(pages).skip(found.0.len()) {
            let id = match self.child(parent, digit) {
                Some(id) if runs && self.nodes[id].as_ref().is_some_and(|node| node.page != page) => break,
                Some(id) => id,
                None => {
                    added.push(page);
                    self.add(parent, digit, page)
                }
            };
            self.touch(id);
            self.note(id, found);
            parent = Some(id);
        }
        added
    }

    /// Takes out up to `n` pages that `is_free` allows, and returns them.
    pub(crate) fn evict(&mut self, n: usize, is_free: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut evicted = Vec::new();
        // No node was used before those behind it: what becomes a leaf comes after the leaf that was taken out.
        let mut from = (0, 0);
        while evicted.len() < n {
            let free = |&&(_, id): &&(u64, usize)| self.nodes[id].as_ref().is_some_and(|node| is_free(node.page));
            let Some(&(used, id)) = self.leaves.range(from..).find(free) else {
                break;
            };
            evicted.extend(self.remove_leaf(id));
            from = (used, 0);
        }
        evicted
    }

    /// Forgets what of a path has left the tree, and uses the rest of it. Nodes leave from the ends of paths: before one that is
    /// there, all are.
    fn revisit(&mut self, found: &mut Found) {
        let is_there = |place: &Place| self.nodes[place.id].as_ref().is_some_and(|node| node.birth == place.birth);
        let there = found.0.iter().rposition(is_there).map_or(0, |last| last + 1);
        found.0.truncate(there);
        found.0.iter().for_each(|place| self.touch(place.id));
    }

    fn note(&self, id: usize, found: &mut Found) {
        found.0.extend(self.nodes[id].as_ref().map(|node| Place { id, birth: node.birth }));
    }

    /// How many pages [`Self::evict`] could take out: those with no other page after them that must stay.
    #[cfg(test)]
    pub(crate) fn evictable(&self, is_free: impl Fn(u32) -> bool) -> usize {
        let mut stays = vec![false; self.nodes.len()];
        for (mut id, node) in self.nodes.iter().enumerate().filter_map(|(id, node)| Some((id, node.as_ref()?))) {
            if is_free(node.page) {
                continue;
            }
            while !std::mem::replace(&mut stays[id], true) {
                match self.nodes[id].as_ref().and_then(|node| node.parent) {
                    Some(parent) => id = parent,
                    None => break,
                }
            }
        }
        self.len() - stays.into_iter().filter(|stays| *stays).count()
    }

    fn child(&self, parent: Option<usize>, tokens: &[u32]) -> Option<usize> {
        #[cfg(test)]
        self.compared.set(self.compared.get() + 1);
        match parent {
            None => self.roots.get(tokens).copied(),
            Some(parent) => self.nodes[parent].as_ref()?.children.get(tokens).copied(),
        }
    }

    fn add(&mut self, parent: Option<usize>, tokens: &[u32], page: u32) -> usize {
        let tokens: Box<[u32]> = tokens.into();
        self.births += 1;
        let (birth, used) = (self.births, self.clock);
        let node = Node { birth, page, tokens: tokens.clone(), parent, children: HashMap::new(), used };
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                self.nodes.push(None);
                self.nodes.len() - 1
            }
        };
        self.nodes[id] = Some(node);
        self.leaves.insert((self.clock, id));
        match parent.and_then(|parent| self.nodes[parent].as_mut().map(|node| (parent, node))) {
            None => self.roots.insert(tokens, id),
            Some((parent, node)) => {
                self.leaves.remove(&(node.used, parent));
                node.children.insert(tokens, id)
            }
        };
        id
    }

    fn touch(&mut self, id: usize) {
        let Some(node) = &mut self.nodes[id] else {
            return;
        };
        let before = std::mem::replace(&mut node.used, self.clock);
        if node.children.is_empty() && self.leaves.remove(&(before, id)) {
            self.leaves.insert((self.clock, id));
        }
    }

    fn remove_leaf(&mut self, id: usize) -> Option<u32> {
        let node = self.nodes[id].take()?;
        self.vacant.push(id);
        self.leaves.remove(&(node.used, id));
        match node.parent.and_then(|parent| self.nodes[parent].as_mut().map(|node| (parent, node))) {
            None => {
                self.roots.remove(&node.tokens);
            }
            Some((parent, above)) => {
                above.children.remove(&node.tokens);
                if above.children.is_empty() {
                    self.leaves.insert((above.used, parent));
                }
            }
        }
        Some(node.page)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 2;

    /// Every path as a list: tokens of whole pages, and the page of the last.
    #[derive(Default)]
    struct Naive {
        paths: Vec<Path>,
        clock: u64,
    }

    struct Path {
        tokens: Vec<u32>,
        page: u32,
        used: u64,
    }

    impl Naive {
        fn prefixes(tokens: &[u32]) -> impl Iterator<Item = &[u32]> {
            (1..=tokens.len() / PAGE).map(move |n| &tokens[..n * PAGE])
        }

        fn longest_prefix(&mut self, tokens: &[u32]) -> Vec<u32> {
            self.clock += 1;
            let mut pages = Vec::new();
            for prefix in Self::prefixes(tokens) {
                match self.paths.iter_mut().find(|path| path.tokens == prefix) {
                    Some(path) => {
                        path.used = self.clock;
                        pages.push(path.page);
                    }
                    None => break,
                }
            }
            pages
        }

        fn insert(&mut self, tokens: &[u32], pages: &[u32], runs: bool) -> Vec<u32> {
            self.clock += 1;
            let mut added = Vec::new();
            for (prefix, &page) in Self::prefixes(tokens).zip(pages) {
                match self.paths.iter_mut().find(|path| path.tokens == prefix) {
                    Some(path) if runs && path.page != page => break,
                    Some(path) => path.used = self.clock,
                    None => {
                        self.paths.push(Path { tokens: prefix.to_vec(), page, used: self.clock });
                        added.push(page);
                    }
                }
            }
            added
        }

        fn is_leaf(&self, path: &Path) -> bool {
            !self
                .paths
                .iter()
                .any(|other| other.tokens.len() > path.tokens.len() && other.tokens.starts_with(&path.tokens))
        }

        /// Whether the page may go as one of the oldest; several may be equally old.
        fn evict(&mut self, page: u32, is_free: impl Fn(u32) -> bool) -> bool {
            let free = |path: &Path| is_free(path.page) && self.is_leaf(path);
            let oldest = self.paths.iter().filter(|path| free(path)).map(|path| path.used).min();
            let is_it = |path: &Path| path.page == page && Some(path.used) == oldest && free(path);
            match self.paths.iter().position(is_it) {
                Some(place) => {
                    self.paths.remove(place);
                    true
                }
                None => false,
            }
        }

        fn evictable(&self, is_free: impl Fn(u32) -> bool) -> usize {
            let stays = |path: &&Path| {
                self.paths.iter().any(|other| other.tokens.starts_with(&path.tokens) && !is_free(other.page))
            };
            self.paths.len() - self.paths.iter().filter(stays).count()
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        LookUp(Vec<u32>),
        /// Tokens of a request, how many of its first pages are the tree's own if it has them, and whether it runs.
        Insert(Vec<u32>, usize, bool),
        /// So many pages; those that are divisible by the second number must stay.
        Evict(usize, u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let tokens = || prop::collection::vec(0..2u32, 0..11);
        let step = prop_oneof![
            3 => tokens().prop_map(Step::LookUp),
            4 => (tokens(), 0..6usize, any::<bool>()).prop_map(|(tokens, own, runs)| Step::Insert(tokens, own, runs)),
            2 => (0..5usize, 2..9u32).prop_map(|(n, stays)| Step::Evict(n, stays)),
        ];
        prop::collection::vec(step, 1..60)
    }

    /// A prompt that waits is compared once, and then only what might follow.
    #[test]
    fn what_is_known_is_not_compared_again() {
        let (mut tree, tokens) = (PrefixTree::new(PAGE), (0..200).collect::<Vec<u32>>());
        let pages: Vec<u32> = (0..60).collect();
        tree.insert(&tokens[..120], &mut Found::default(), &pages, false);
        let mut found = Found::default();
        assert_eq!(tree.longest_prefix(&tokens, &mut found), pages);
        let before = tree.compared.get();
        assert_eq!(tree.longest_prefix(&tokens, &mut found), pages);
        assert_eq!(tree.compared.get() - before, 1, "the page behind those that are known");
        assert_eq!(tree.evict(10, |_| true).len(), 10);
        assert_eq!(tree.longest_prefix(&tokens, &mut found), pages[..50]);
        assert_eq!(tree.compared.get() - before, 2);
    }

    proptest! {
        #[test]
        fn random_programs_agree_with_a_list_of_paths(steps in steps()) {
            let (mut tree, mut naive, mut next_page) = (PrefixTree::new(PAGE), Naive::default(), 0);
            let mut waiting: Vec<(Vec<u32>, Found)> = Vec::new();
            for step in steps {
                match step {
                    Step::LookUp(tokens) => waiting.push((tokens, Found::default())),
                    Step::Insert(tokens, own, runs) => {
                        let mut found = Found::default();
                        let mut pages = tree.longest_prefix(&tokens, &mut found);
                        prop_assert_eq!(&pages, &naive.longest_prefix(&tokens));
                        pages.truncate(own);
                        found.truncate(own);
                        let new = tokens.len() / PAGE - pages.len();
                        pages.extend((next_page..).take(new));
                        next_page += new as u32;
                        for _ in 0..2 {
                            let added = tree.insert(&tokens, &mut found, &pages, runs);
                            prop_assert_eq!(added, naive.insert(&tokens, &pages, runs));
                        }
                    }
                    Step::Evict(n, stays) => {
                        let is_free = |page: u32| !page.is_multiple_of(stays);
                        let possible = tree.evictable(is_free);
                        prop_assert_eq!(possible, naive.evictable(is_free));
                        let evicted = tree.evict(n, is_free);
                        prop_assert_eq!(evicted.len(), n.min(possible));
                        for page in evicted {
                            prop_assert!(naive.evict(page, is_free), "page {} is not the oldest", page);
                        }
                    }
                }
                // Found again and again, from where they were found the last time.
                for (tokens, found) in &mut waiting {
                    prop_assert_eq!(tree.longest_prefix(tokens, found), naive.longest_prefix(tokens));
                }
                prop_assert_eq!(tree.len(), naive.paths.len());
            }
            tree.evict(usize::MAX, |_| true);
            prop_assert!(tree.len() == 0 && tree.leaves.is_empty() && tree.roots.is_empty());
        }
    }
}
