//! Where keys of a tile belong that are chosen.

use cubecl::prelude::*;

use super::border::load_index;
use super::form::{Form, LOAD};
use super::sums::{FEW, Space, before_plane, through_plane};
use crate::common::plane;

/// Where some keys of a tile belong. The numbers of two have 8 bits for each load, loads of even number and of odd number.
#[derive(CubeType)]
pub(super) struct Places {
    /// In the units before this one of its plane.
    even: u32,
    odd: u32,
    /// In this plane.
    plane_even: u32,
    plane_odd: u32,
    /// In the planes before this one.
    before: u32,
    /// In the tile.
    pub all: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Places {
    /// Of keys with a bit for each, which then are in shared memory. Called by all units of a cube.
    pub fn of(keys: u32, space: &mut Space, #[comptime] form: Form) -> Places {
        space.keys[UNIT_POS as usize] = keys;
        let twos = keys - ((keys >> 1) & 0x5555_5555u32);
        let fours = (twos & 0x3333_3333u32) + ((twos >> 2) & 0x3333_3333u32);
        let own_even = fours & 0x0f0f_0f0fu32;
        let own_odd = (fours >> 4) & 0x0f0f_0f0fu32;
        let mut through_even = own_even;
        let mut through_odd = own_odd;
        let mut plane_even = own_even;
        let mut plane_odd = own_odd;
        if comptime!(form.plane > 1) {
            let last = comptime!(form.plane as u32 - 1).runtime();
            through_even = through_plane(own_even, form);
            through_odd = through_plane(own_odd, form);
            plane_even = plane::shuffle::<u32>(through_even, last);
            plane_odd = plane::shuffle::<u32>(through_odd, last);
        }
        let half = 0x00ff_00ffu32;
        let loads = (plane_even & half) + (plane_odd & half) + ((plane_even >> 8) & half) + ((plane_odd >> 8) & half);
        let sums = before_plane(&mut space.sums, (loads & 0xffffu32) + (loads >> 16), form);
        Places {
            even: through_even - own_even,
            odd: through_odd - own_odd,
            plane_even,
            plane_odd,
            before: sums.before,
            all: sums.all,
            form,
        }
    }

    /// The place of a load's first key.
    fn of_load(&self, #[comptime] i: usize) -> u32 {
        let mut place = self.before + self.of_units(i);
        #[unroll]
        for earlier in 0..i {
            let loads = if comptime!(earlier.is_multiple_of(2)) { self.plane_even } else { self.plane_odd };
            place += (loads >> comptime!((earlier / 2 * 8) as u32)) & 0xffu32;
        }
        place
    }

    /// How many of a load are in the units before.
    fn of_units(&self, #[comptime] i: usize) -> u32 {
        let loads = if comptime!(i.is_multiple_of(2)) { self.even } else { self.odd };
        (loads >> comptime!((i / 2 * 8) as u32)) & 0xffu32
    }

    /// Those of the keys whose place is before this one.
    pub fn first_keys(&self, space: &Space, end: u32) -> u32 {
        let keys = space.keys[UNIT_POS as usize];
        let mut first = 0u32;
        #[unroll]
        for i in 0..self.form.loads {
            let mut place = self.of_load(i);
            #[unroll]
            for n in 0..LOAD {
                let key = keys & comptime!(1u32 << (i * LOAD + n));
                first |= select(place < end, key, 0u32);
                place += u32::cast_from(key != 0);
            }
        }
        first
    }

    /// Puts the numbers in the list of the keys from place `first` on into shared memory, as many as there is room for.
    pub fn put(&self, first: u32, space: &mut Space, tile: usize) {
        let keys = space.keys[UNIT_POS as usize];
        #[unroll]
        for i in 0..self.form.loads {
            let mut place = self.of_load(i) - first;
            let key = (load_index(tile, i, self.form) * LOAD) as u32;
            #[unroll]
            for n in 0..LOAD {
                let chosen = keys & comptime!(1u32 << (i * LOAD + n)) != 0;
                if chosen & (place < comptime!((FEW * self.form.units) as u32)) {
                    space.few[place as usize] = key + n as u32;
                }
                place += u32::cast_from(chosen);
            }
        }
    }
}
