//! Fences, groups of asynchronous operations, barriers, mbarriers (PTX ISA 9.7.9.25, 9.7.13, 9.7.15, 9.7.16).
use crate::edit::{altered, beside};
use crate::site::{Change, Site};
use ptx_sim::{Instr, Operand};

/// `fence`, `membar`, the fences of matrix instructions: removed. Orders that an operation carries: taken away.
pub(super) fn fences(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    if matches!(parts[0], "fence" | "membar") || parts.iter().any(|p| *p == "fence" || p.starts_with("fence::")) {
        changes.push(site.removed("fence"));
        return;
    }
    let opcode = &site.instr().opcode;
    let orders = [".release", ".acquire", ".acq_rel"].into_iter().filter(|order| opcode.contains(order));
    changes.extend(orders.map(|order| site.opcode("order", &opcode.replace(order, ".relaxed"))));
}

/// `commit_group`, `wait_group N`, `tcgen05.commit`, `tcgen05.wait`.
pub(super) fn groups(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let is = |name: &str| parts.contains(&name);
    if is("commit_group") || matches!(parts, ["tcgen05", "commit", ..]) {
        changes.push(site.removed("commit"));
    }
    if matches!(parts, ["tcgen05", first, ..] if first.starts_with("wait")) || is("wait_all") {
        changes.push(site.removed("wait_group"));
    }
    if is("wait_group") {
        changes.push(site.removed("wait_group"));
        if let [Operand::Int(pending)] = site.instr().operands[..] {
            let more = Instr { operands: vec![Operand::Int(pending + 1)], ..site.instr().clone() };
            changes.push(site.replaced("wait_group", format!("{pending}->{}", pending + 1), vec![more]));
        }
    }
}

/// Named barriers, the barriers of clusters and warps.
pub(super) fn barriers(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    if matches!(parts, ["bar", "warp", ..]) {
        changes.push(site.removed("syncwarp"));
        return;
    }
    if !matches!(parts[0], "bar" | "barrier") {
        return;
    }
    changes.push(site.removed("barrier"));
    if parts.contains(&"cluster") {
        return;
    }
    let instr = site.instr();
    if let Some(Operand::Int(count)) = instr.operands.get(1) {
        // With all threads of the CTA, one barrier is as good as another.
        let with = altered(instr, ("xor.b32", 1), |i| i.operands.first_mut());
        changes.extend(with.map(|with| site.replaced("barrier", "id^1", with)));
        for count in [count.saturating_sub(32), count + 32].into_iter().filter(|c| *c > 0 && *c <= 1024) {
            let mut with = instr.clone();
            with.operands[1] = Operand::Int(count);
            changes.push(site.replaced("barrier", format!("count {count}"), vec![with]));
        }
    }
}

/// Arrivals, waits, parities, byte counts, initial counts of mbarriers.
pub(super) fn mbarriers(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    let is = |name: &str| parts.contains(&name);
    if !is("mbarrier") {
        return;
    }
    if is("arrive") || is("arrive_drop") {
        changes.push(site.removed("arrive"));
    }
    if is("init")
        && let Some(Operand::Int(count)) = instr.operands.get(1)
    {
        for count in [count - 1, count + 1].into_iter().filter(|c| *c > 0) {
            let mut with = instr.clone();
            with.operands[1] = Operand::Int(count);
            changes.push(site.replaced("init_count", format!("to {count}"), vec![with]));
        }
    }
    if is("expect_tx") {
        let alterations = [
            ("doubled", ("shl.b32", 1)),
            ("halved", ("shr.u32", 1)),
            ("+16", ("add.s32", 16)),
            ("-16", ("add.s32", 16u64.wrapping_neg() & 0xffff_ffff)),
        ];
        for (change, alteration) in alterations {
            if let Some(with) = altered(instr, alteration, |i| i.operands.last_mut()) {
                changes.push(site.replaced("expect_tx", change, with));
            }
        }
    }
    if is("try_wait") || is("test_wait") {
        if let Some(with) = altered(instr, ("xor.b32", 1), |i| i.operands.get_mut(2)) {
            changes.push(site.replaced("parity", "flipped", with));
        }
        let passed = beside(instr, "setp.eq.u32", vec![instr.operands[0].clone(), Operand::Int(0), Operand::Int(0)]);
        changes.push(site.replaced("wait", "succeeds at once", vec![Instr { guard: instr.guard.clone(), ..passed }]));
    }
}
