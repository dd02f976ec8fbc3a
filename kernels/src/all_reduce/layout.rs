//! How an all-reduce is divided, and how mailboxes are laid out. The number of cubes depends on the number of elements alone: cubes of
//! the same number of all ranks exchange what they have.

/// Units of a cube.
pub(super) const UNITS: usize = 256;
/// Cubes at most. All of them have to be there at once, or two ranks could each run those that the other has yet to start.
pub(super) const MOST_CUBES: usize = 128;
/// Packets of a cube at most.
pub(super) const REGION: usize = 4096;
/// Ranks at most: devices of one machine.
pub const MOST_RANKS: usize = 8;
/// Bytes of `x` in a packet.
pub(super) const PAYLOAD: usize = 4;
/// Bytes of a packet: the payload, and the epoch.
pub(super) const PACKET: usize = 8;
/// Buffers of a region, which epochs take in turns.
pub(super) const BUFFERS: usize = 2;

/// Bytes of a mailbox: for each cube, buffer and sender a region, in this order.
pub(super) const fn mailbox_bytes(ranks: usize) -> usize {
    MOST_CUBES * BUFFERS * ranks * REGION * PACKET
}

/// Cubes for so many packets.
pub(super) fn cubes(packets: usize) -> usize {
    packets.div_ceil(UNITS).clamp(1, MOST_CUBES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_has_a_place_in_its_cubes_region() {
        let most = MOST_CUBES * REGION;
        for packets in [1, 2, UNITS, UNITS + 1, UNITS * MOST_CUBES, UNITS * MOST_CUBES + 1, most - 1, most] {
            let cubes = cubes(packets);
            assert!(cubes <= MOST_CUBES && packets.div_ceil(cubes * UNITS) * UNITS <= REGION, "{packets}");
            // Each has a packet at least: what it gets from the others tells it that they have read its older ones.
            assert!((cubes - 1) * UNITS < packets, "{packets}");
        }
    }

    #[test]
    fn offsets_are_words() {
        assert!(u32::try_from(mailbox_bytes(MOST_RANKS)).is_ok());
    }
}
