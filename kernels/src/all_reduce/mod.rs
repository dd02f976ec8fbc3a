//! The sum over all ranks, of which each is a device of this process, by one kernel on each: it writes its rows into the memory of
//! the others and adds up what they have written into its own.
//!
//! The README has the protocol, and why it is right.

mod layout;

use cubecl::prelude::*;
use thiserror::Error;

pub use self::layout::MOST_RANKS;
use self::layout::{BUFFERS, MOST_CUBES, PACKET, PAYLOAD, REGION, UNITS};
use crate::ptx::peer;

/// Bytes of `x` at most.
pub const CAPACITY: usize = MOST_CUBES * REGION * PAYLOAD;
/// Bytes of the epochs of a rank, one for each cube.
pub const EPOCHS_BYTES: usize = MOST_CUBES * size_of::<u32>();
/// Two words that are NaN whatever float type they are read as.
const NAN: u32 = 0x7fff_7fff;
/// How often a unit looks for a packet before it looks at the clock.
const POLLS: u32 = 256;

/// Bytes of the mailbox of each of so many ranks: zeros before the first launch, then the kernel's alone.
///
/// # Errors
/// [`AllReduceError::Ranks`].
pub fn mailbox_bytes(ranks: usize) -> Result<usize, AllReduceError> {
    if (2..=MOST_RANKS).contains(&ranks) {
        Ok(layout::mailbox_bytes(ranks))
    } else {
        Err(AllReduceError::Ranks { ranks })
    }
}

/// What an all-reduce cannot do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AllReduceError {
    /// Too many ranks, or too few.
    #[error("`ranks` is {ranks}, expected 2 to {MOST_RANKS}")]
    Ranks {
        /// As many.
        ranks: usize,
    },
    /// More than mailboxes hold.
    #[error("`x` has {bytes} bytes, expected at most {CAPACITY}")]
    Capacity {
        /// Bytes of `x`.
        bytes: usize,
    },
}

/// Arguments of [`launch`]; E is `elem`.
pub struct AllReduceArgs {
    /// E `[elements]`.
    pub x: BufferArg,
    /// E `[elements]`, written: the sum over all ranks, in their order, in f32; NaN where a rank did not come in time.
    pub out: BufferArg,
    /// The address of this rank's epochs, [`EPOCHS_BYTES`] of them.
    pub epochs: u64,
    /// The addresses of the mailboxes of all ranks, as this device sees them; zeros behind them.
    pub mailboxes: [u64; MOST_RANKS],
    /// Elements, the same on all ranks.
    pub elements: usize,
    /// The number of this rank.
    pub rank: usize,
    /// Ranks.
    pub ranks: usize,
    /// How long a rank is waited for, in units of 1024 ns.
    pub patience: u32,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `out`. Without elements nothing is launched.
///
/// # Errors
/// [`AllReduceError`]; then nothing is launched.
pub fn launch(client: &Client, args: AllReduceArgs) -> Result<(), AllReduceError> {
    let AllReduceArgs { epochs, mailboxes, elements, rank, ranks, patience, elem, .. } = args;
    mailbox_bytes(ranks)?;
    let bytes = elements * elem.size();
    if bytes > CAPACITY {
        return Err(AllReduceError::Capacity { bytes });
    }
    if elements == 0 {
        return Ok(());
    }
    let (lanes, packets) = (lanes(elem), elements.div_ceil(lanes(elem)));
    let vector = if elements.is_multiple_of(lanes) { lanes } else { 1 };
    all_reduce_kernel::launch(
        client,
        CubeCount::Static(layout::cubes(packets) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        AddressType::U32,
        vector,
        args.x,
        args.out,
        epochs,
        mailboxes[0],
        mailboxes[1],
        mailboxes[2],
        mailboxes[3],
        mailboxes[4],
        mailboxes[5],
        mailboxes[6],
        mailboxes[7],
        packets,
        elements / vector,
        patience,
        rank,
        ranks,
        lanes,
        elem,
    );
    Ok(())
}

/// Elements of a packet.
fn lanes(elem: ElemType) -> usize {
    PAYLOAD / elem.size()
}

/// A unit has every packet that lies a grid behind its last one, of `lanes` elements each.
///
/// Addresses are arguments of their own: in a buffer they would be read before the first packet could be sent, and a buffer that
/// another stream has made cannot be waited for in a capture.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn all_reduce_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    epochs: u64,
    mailbox_0: u64,
    mailbox_1: u64,
    mailbox_2: u64,
    mailbox_3: u64,
    mailbox_4: u64,
    mailbox_5: u64,
    mailbox_6: u64,
    mailbox_7: u64,
    packets: usize,
    vectors: usize,
    patience: u32,
    #[comptime] rank: usize,
    #[comptime] ranks: usize,
    #[comptime] lanes: usize,
    #[define(E)] _elem: ElemType,
) {
    let start = peer::time();
    let cube = CUBE_POS as u32;
    let unit = UNIT_POS as usize;
    let mut mailboxes = Sequence::<u64>::new();
    mailboxes.push(mailbox_0);
    mailboxes.push(mailbox_1);
    mailboxes.push(mailbox_2);
    mailboxes.push(mailbox_3);
    mailboxes.push(mailbox_4);
    mailboxes.push(mailbox_5);
    mailboxes.push(mailbox_6);
    mailboxes.push(mailbox_7);
    let counter = epochs + u64::cast_from(cube * 4);
    let epoch = next_epoch(peer::load_word(counter));
    let step = CUBE_COUNT * UNITS;
    let first = CUBE_POS * UNITS + unit;
    // Of the region of this rank as the sender, which lies at the same place in all mailboxes.
    let buffer = (cube * comptime!(BUFFERS as u32) + epoch % 2) * comptime!((ranks * REGION * PACKET) as u32);

    let mut packet = first;
    let mut place = buffer + UNIT_POS * comptime!(PACKET as u32);
    while packet < packets {
        let bits = load(x, packet, vectors, lanes);
        #[unroll]
        for to in 0..ranks {
            if comptime!(to != rank) {
                let region = mailboxes[to] + u64::cast_from(place + region_of(rank));
                peer::store_pair(region, bits, epoch);
            }
        }
        packet += step;
        place += comptime!((UNITS * PACKET) as u32);
    }

    packet = first;
    place = buffer + UNIT_POS * comptime!(PACKET as u32);
    while packet < packets {
        let own = load(x, packet, vectors, lanes);
        let mut low = 0.0f32;
        let mut high = 0.0f32;
        #[unroll]
        for from in 0..ranks {
            let mut bits = own;
            if comptime!(from != rank) {
                let region = mailboxes[rank] + u64::cast_from(place + region_of(from));
                bits = receive(region, epoch, start, patience);
            }
            let terms = terms::<E>(bits, lanes);
            // Not from zero on: minus zero has to stay what it is.
            if comptime!(from == 0) {
                low = terms.extract(0usize);
                high = terms.extract(1usize);
            } else {
                low += terms.extract(0usize);
                high += terms.extract(1usize);
            }
        }
        store(out, packet, vectors, low, high, lanes);
        packet += step;
        place += comptime!((UNITS * PACKET) as u32);
    }

    // All units have read the epoch.
    sync_cube();
    if unit == 0 {
        peer::store_word(counter, epoch);
    }
}

/// The epoch behind another. Behind the last one comes 2: 0 is what mailboxes hold at first, and two that follow each other have
/// different buffers.
#[cube]
fn next_epoch(last: u32) -> u32 {
    select(last == u32::MAX, 2u32, last + 1)
}

/// Bytes from a buffer's start to the region of a sender.
#[cube]
fn region_of(#[comptime] sender: usize) -> u32 {
    comptime!((sender * REGION * PACKET) as u32).runtime()
}

/// The payload of a packet; zeros behind the last element.
#[cube]
fn load<E: Float, N: Size>(x: &[Vector<E, N>], packet: usize, vectors: usize, #[comptime] lanes: usize) -> u32 {
    let width = N::value().comptime();
    if comptime!(width == lanes) {
        u32::reinterpret(x[packet])
    } else {
        let mut bits = u32::cast_from(u16::reinterpret(x[packet * 2]));
        if packet * 2 + 1 < vectors {
            bits |= u32::cast_from(u16::reinterpret(x[packet * 2 + 1])) << 16;
        }
        bits
    }
}

/// The numbers of a packet. Of f32 the second is the first.
#[cube]
fn terms<E: Float>(bits: u32, #[comptime] lanes: usize) -> Vector<f32, Const<2>> {
    if comptime!(lanes == 1) {
        Vector::new(f32::reinterpret(bits))
    } else {
        Vector::cast_from(Vector::<E, Const<2>>::reinterpret(bits))
    }
}

/// Waits for a packet of this epoch: its payload; NaN if it does not come in time, counted from the kernel's start.
#[cube]
fn receive(address: u64, epoch: u32, start: u32, patience: u32) -> u32 {
    let mut pair = peer::load_pair(address);
    let mut polls = 0u32;
    let mut is_late = false;
    while pair.extract(1usize) != epoch && !is_late {
        pair = peer::load_pair(address);
        polls += 1;
        let since_the_clock = polls % POLLS;
        if since_the_clock == 0 {
            is_late = peer::time() - start > patience;
        }
    }
    select(pair.extract(1usize) == epoch, pair.extract(0usize), NAN)
}

/// Writes the numbers of a packet.
#[cube]
fn store<E: Float, N: Size>(
    out: &mut [Vector<E, N>],
    packet: usize,
    vectors: usize,
    low: f32,
    high: f32,
    #[comptime] lanes: usize,
) {
    let width = N::value().comptime();
    if comptime!(lanes == 1) {
        out[packet] = Vector::cast_from(low);
    } else if comptime!(width == lanes) {
        let mut pair = Vector::<E, N>::cast_from(low);
        pair.insert(1usize, E::cast_from(high));
        out[packet] = pair;
    } else {
        out[packet * 2] = Vector::cast_from(low);
        if packet * 2 + 1 < vectors {
            out[packet * 2 + 1] = Vector::cast_from(high);
        }
    }
}

/// Two ranks and as many as there may be, and an odd number of elements.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let lanes = lanes(elem);
        let mut forms = vec![("all_reduce", 2, lanes), ("all_reduce.ranks_8", MOST_RANKS, lanes)];
        if lanes > 1 {
            forms.push(("all_reduce.odd", 2, 1));
        }
        forms.into_iter().map(move |(name, ranks, vector)| {
            let cube = CubeDim::new_1d(UNITS as u32);
            let form = form!(
                all_reduce_kernel,
                cube,
                [AddressType::U32, vector, _, _, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, ranks, lanes, elem]
            );
            Entry::of(kind, name, form)
        })
    });
    forms.collect()
}
