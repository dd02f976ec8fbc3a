//! Requests that go on from a snapshot of the state of another one.

use super::*;

/// Runs a prompt to its first token, and leaves; the steps that it takes.
fn run(scheduler: &mut Scheduler, id: u64, prompt: &[u32]) -> usize {
    scheduler.push(Job::new(id, prompt.to_vec()));
    let mut steps = 0;
    while !scheduler.is_complete(id) {
        let plan = scheduler.plan().unwrap();
        compute(scheduler, &plan);
        scheduler.computed(&plan).unwrap();
        check(scheduler);
        steps += 1;
    }
    scheduler.remove(id).unwrap();
    steps
}

fn hits(scheduler: &mut Scheduler, id: u64, prompt: &[u32]) -> usize {
    let before = scheduler.counts.prefix_hits;
    run(scheduler, id, prompt);
    scheduler.counts.prefix_hits - before
}

/// Snapshots are at multiples of the spacing, and at the last whole page of a prompt.
#[test]
fn a_request_goes_on_from_the_last_snapshot_of_the_common_prefix() {
    let mut scheduler = scheduler(Sharing::Snapshots(8));
    let prompt: Vec<u32> = (0..23).collect();
    // A step takes 9 tokens, and whole pages of them; the last one has that behind 20 on its way.
    assert_eq!(run(&mut scheduler, 0, &prompt), 3);
    assert_eq!(scheduler.snapshots(), [3, 8]);
    assert_eq!(scheduler.idle_pages(), 5);
    let all = [(23, 20), (22, 20), (21, 20), (20, 16), (17, 16), (16, 8), (12, 8), (9, 8), (8, 0), (4, 0), (1, 0)];
    for (shared, expected) in all {
        let hits_of = |prompt: &[u32]| {
            let mut scheduler = super::scheduler(Sharing::Snapshots(8));
            run(&mut scheduler, 0, &(0..23).collect::<Vec<u32>>());
            hits(&mut scheduler, 1, prompt)
        };
        let same = &prompt[..shared];
        assert_eq!(hits_of(same), expected, "a prompt of {shared} tokens");
        let expected = if shared >= 20 { 20 } else { shared / SPACING * SPACING };
        assert_eq!(hits_of(&[same, &[99; 3]].concat()), expected, "{shared} tokens in common");
    }
}

/// Behind the last common snapshot a request computes again what has pages already: it goes on with those, so that what comes after
/// them is found, too, and no page is there twice.
#[test]
fn what_is_computed_again_has_one_page() {
    let mut scheduler = scheduler(Sharing::Snapshots(8));
    let common: Vec<u32> = (0..13).collect();
    let texts = [7, 8].map(|token| [&common[..], &[token; 6]].concat());
    // Snapshots behind 8 and 16 tokens; three pages in common, and one of each.
    assert_eq!(texts.each_ref().map(|text| hits(&mut scheduler, 0, text)), [0, 8]);
    assert_eq!((scheduler.snapshots(), scheduler.idle_pages()), ([3, 8], 5));
    assert_eq!(texts.each_ref().map(|text| hits(&mut scheduler, 0, text)), [16, 16]);
}

/// A slot goes from the snapshot that was unused for the longest time to a new one; the pages stay as long as there is room.
#[test]
fn the_longest_unused_snapshot_makes_room() {
    let mut scheduler = scheduler(Sharing::Snapshots(2));
    let prompts = [1, 2, 3].map(|token| vec![token; 6]);
    for (id, prompt) in (0..).zip(&prompts) {
        assert_eq!(hits(&mut scheduler, id, prompt), 0);
        // The first one is used again each time.
        assert_eq!(hits(&mut scheduler, id, &prompts[0]), 4);
    }
    assert_eq!((scheduler.snapshots(), scheduler.idle_pages()), ([2, 2], 3));
    assert_eq!(prompts.each_ref().map(|prompt| hits(&mut scheduler, 9, prompt)), [4, 0, 0]);
    scheduler.reset_prefix_cache().unwrap();
    assert_eq!((scheduler.snapshots(), scheduler.cache.free_pages()), ([0, 2], PAGES));
}

/// Who is preempted goes on from a snapshot of its own.
#[test]
fn a_preempted_request_recomputes_what_follows_its_last_snapshot() {
    let mut scheduler = scheduler(Sharing::Snapshots(8));
    let mut world = World::default();
    for (len, n) in [(13, 12), (14, 12)] {
        let kind = usize::from(len == 14) * 2;
        world.act(&mut scheduler, &Action::Submit(kind, len, n));
    }
    while !world.wanted.is_empty() {
        world.step(&mut scheduler);
    }
    let counts = scheduler.counts;
    assert!(counts.preemptions > 0 && counts.prefix_hits >= 8, "{counts:?}");
    assert!(counts.recomputed_tokens > 0 && counts.recomputed_tokens < 14 * counts.preemptions, "{counts:?}");
}

#[test]
fn a_spacing_that_is_no_multiple_of_the_pages_is_refused() {
    for spacing in [0, 1, PAGE + 1] {
        let mut cache = scheduler(Sharing::Nothing).cache;
        let error = PrefixCache::with_snapshots(&mut cache, spacing, 4).unwrap_err().to_string();
        assert!(error.contains("`snapshot_spacing`") && error.contains("a multiple of 4"), "{error}");
    }
}
