//! Rows written into a cache, against the same assignments on the host. Everything is compared bit for bit: rows that no
//! token goes to, too.

use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::write_latent::{WriteLatentArgs, WriteRowsArgs, launch_write_latent, launch_write_rows};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, skip, upload};

/// A buffer of the type, as words: numbers that differ everywhere.
fn values<E: CubeElement + Scalar>(seed: u32, len: usize, of: fn(f32) -> E) -> Vec<E> {
    random(seed, len).into_iter().map(of).collect()
}

fn supported<E: CubeElement + Scalar>(client: &Client) -> bool {
    let supported = E::supported_uses(client).contains(TypeUsage::Buffer);
    if !supported {
        skip(format_args!("this device has no {}", E::type_name()));
    }
    supported
}

/// A slot for each token in no order, each at most once; every fifth token is skipped, and one slot is past the cache.
fn slots(tokens: usize, slot_count: usize) -> Vec<i32> {
    assert!(tokens < slot_count && !slot_count.is_multiple_of(7), "7 steps must visit different slots");
    let slot = |token: usize| match token {
        3 => slot_count as i32,
        token if token % 5 == 4 => -1,
        token => (token * 7 % slot_count) as i32,
    };
    (0..tokens).map(slot).collect()
}

fn write_two_parts<E: CubeElement + Scalar + PartialEq>(
    client: &Client,
    [tokens, latent_width, rope_width]: [usize; 3],
    of: fn(f32) -> E,
) {
    if !supported::<E>(client) {
        return;
    }
    let slot_count = 16 * (tokens / 16 + 2);
    let width = latent_width + rope_width;
    // With a row behind the cache, which the slot past the end would land in.
    let mut cache = values(1, (slot_count + 1) * width, of);
    let (latent, rope) = (values(2, tokens * latent_width, of), values(3, tokens * rope_width, of));
    let slots = slots(tokens, slot_count);
    let device_cache = upload(client, &cache);
    launch_write_latent(
        client,
        WriteLatentArgs {
            cache: arg(&device_cache, slot_count * width),
            slots: arg(&upload(client, &slots), tokens),
            latent: arg(&upload(client, &latent), latent.len()),
            rope: arg(&upload(client, &rope), rope.len()),
            slot_count,
            tokens,
            latent_width,
            rope_width,
            elem: E::cube_type(),
        },
    );
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| (0..slot_count as i32).contains(slot)) {
        let row = &mut cache[slot as usize * width..][..width];
        row[..latent_width].copy_from_slice(&latent[token * latent_width..][..latent_width]);
        row[latent_width..].copy_from_slice(&rope[token * rope_width..][..rope_width]);
    }
    assert!(read::<E>(client, device_cache) == cache, "{tokens} tokens of {latent_width} + {rope_width}");
}

fn write_whole_rows<E: CubeElement + Scalar + PartialEq>(
    client: &Client,
    [tokens, width]: [usize; 2],
    of: fn(f32) -> E,
) {
    if !supported::<E>(client) {
        return;
    }
    let slot_count = 16 * (tokens / 16 + 2);
    let mut cache = values(1, (slot_count + 1) * width, of);
    let rows = values(2, tokens * width, of);
    let slots = slots(tokens, slot_count);
    let device_cache = upload(client, &cache);
    launch_write_rows(
        client,
        WriteRowsArgs {
            cache: arg(&device_cache, slot_count * width),
            slots: arg(&upload(client, &slots), tokens),
            rows: arg(&upload(client, &rows), rows.len()),
            slot_count,
            tokens,
            width,
            elem: E::cube_type(),
        },
    );
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| (0..slot_count as i32).contains(slot)) {
        cache[slot as usize * width..][..width].copy_from_slice(&rows[token * width..][..width]);
    }
    assert!(read::<E>(client, device_cache) == cache, "{tokens} rows of {width}");
}

/// Widths whose parts allow different vector sizes, and such as allow none.
#[rstest]
#[case([1, 1, 1])]
#[case([9, 16, 4])]
#[case([10, 7, 3])]
#[case([40, 24, 16])]
#[case([33, 512, 64])]
#[case([5, 1030, 2])]
fn latent_and_rope(#[case] shape: [usize; 3]) {
    for_each_client(|client| {
        write_two_parts(client, shape, |value| value);
        write_two_parts(client, shape, f16::from_f32);
        write_two_parts(client, shape, bf16::from_f32);
    });
}

/// The last has a cube per row, more of them than wgpu launches along one axis.
#[rstest]
#[case([1, 1])]
#[case([30, 7])]
#[case([12, 576])]
#[case([20, 132])]
#[case([65_700, 129])]
fn whole_rows(#[case] shape: [usize; 2]) {
    for_each_client(|client| {
        write_whole_rows(client, shape, |value| value);
        write_whole_rows(client, shape, f16::from_f32);
        write_whole_rows(client, shape, bf16::from_f32);
    });
}

#[test]
fn no_tokens() {
    for_each_client(|client| {
        let cache = upload(client, &[1.0f32, 2.0]);
        launch_write_rows(
            client,
            WriteRowsArgs {
                cache: arg(&cache, 2),
                slots: arg(&cache, 0),
                rows: arg(&cache, 0),
                slot_count: 1,
                tokens: 0,
                width: 2,
                elem: f32::cube_type(),
            },
        );
        assert_eq!(read::<f32>(client, cache), [1.0, 2.0]);
    });
}
