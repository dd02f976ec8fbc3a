use super::*;

fn decoded(weight: &BlockWeight, dtype: FloatDType) -> Vec<f32> {
    let parts = weight.parts().map(|rows| weight.decode(rows, &Device::flex(), dtype)).collect();
    Tensor::cat(parts, 0).cast(FloatDType::F32).into_data().try_to_vec().unwrap()
}

#[test]
fn e4m3_bytes_are_the_numbers_of_the_specification() {
    let values = Format::E4m3.values();
    let expected = [
        (0x00, 0.0),
        (0x01, 0.001_953_125),
        (0x07, 0.013_671_875),
        (0x08, 0.015_625),
        (0x38, 1.0),
        (0x39, 1.125),
        (0x40, 2.0),
        (0x7e, 448.0),
        (0xb8, -1.0),
        (0xfe, -448.0),
        (0x81, -0.001_953_125),
    ];
    for (code, value) in expected {
        assert_eq!(values[code], value, "{code:#x}");
    }
    assert!(values[0x7f].is_nan() && values[0xff].is_nan());
    assert_eq!(values.iter().filter(|value| !value.is_finite()).count(), 2);
    assert_eq!(values[0x80].to_bits(), (-0.0f32).to_bits());
}

#[test]
fn e2m1_and_e8m0_are_the_numbers_of_the_specification() {
    let values = Format::E2m1.values();
    assert_eq!(values[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert_eq!(values[8..], [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
    let scales = read_scales(&[0, 1, 126, 127, 130, 254, 255], Dtype::F8_E8M0);
    let expected = [2f32.powi(-127), 2f32.powi(-126), 0.5, 1.0, 8.0, 2f32.powi(127)];
    assert_eq!(scales[..6], expected);
    assert!(scales[6].is_nan());
    assert_eq!(read_scales(&1.5f32.to_le_bytes(), Dtype::F32), [1.5]);
}

/// Blocks of 2 by 2 over 3 by 5: the last row and the last column have blocks of their own.
#[test]
fn e4m3_blocks_with_ragged_edges_are_multiplied_out() {
    let weight = BlockWeight {
        format: Format::E4m3,
        bytes: Cow::Borrowed(&[
            0x38, 0x40, 0x38, 0xb8, 0x39, //
            0x00, 0x38, 0x48, 0x01, 0x38, //
            0x38, 0x38, 0x7e, 0x38, 0xfe,
        ]),
        scales: vec![1.0, 0.5, 3.0, 10.0, 0.1, 2.0],
        block: [2, 2],
        columns: 5,
    };
    let expected = [
        1.0,
        2.0,
        0.5,
        -0.5,
        3.375, //
        0.0,
        1.0,
        2.0,
        0.5 * 0.001_953_125,
        3.0, //
        10.0,
        10.0,
        448.0f32 * 0.1,
        0.1,
        -896.0,
    ];
    assert_eq!(decoded(&weight, FloatDType::F32), expected);
    assert_eq!(weight.decode_on_host(0..3), expected);
    let rounded: Vec<f32> = expected.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect();
    assert_eq!(decoded(&weight, FloatDType::BF16), rounded);
}

/// The low half of a byte is the number with the lower index.
#[test]
fn e2m1_bytes_are_unpacked_low_half_first() {
    let weight = BlockWeight {
        format: Format::E2m1,
        bytes: Cow::Borrowed(&[0x21, 0xf7, 0x0a, 0x43, 0x10, 0x9e]),
        scales: vec![1.0, 4.0, 0.5, 2.0],
        block: [1, 4],
        columns: 6,
    };
    let expected = [0.5, 1.0, 6.0, -6.0, -4.0, 0.0, 0.75, 1.0, 0.0, 0.25, -8.0, -1.0];
    assert_eq!(decoded(&weight, FloatDType::F32), expected);
    assert_eq!(weight.decode_on_host(0..2), expected);
}

/// More rows than are dequantised at once.
#[test]
fn large_weights_are_multiplied_out_in_parts() {
    let (rows, columns, block) = (700usize, 8200usize, [128, 128]);
    let bytes: Vec<u8> = (0..rows * columns).map(|at| (at * 31 % 127) as u8 | (at as u8 & 0x80)).collect();
    let scales = (0..rows.div_ceil(128) * columns.div_ceil(128)).map(|at| 0.001 + at as f32 * 0.37).collect();
    let weight = BlockWeight { format: Format::E4m3, bytes: bytes.into(), scales, block, columns };
    assert!(weight.parts().count() > 1);
    assert_eq!(decoded(&weight, FloatDType::F32), weight.decode_on_host(0..rows));
}

#[test]
fn every_number_rounds_to_the_nearest_code() {
    for format in [Format::E4m3, Format::E2m1] {
        let values: Vec<f32> = format.values().into_iter().filter(|value| !value.is_nan()).collect();
        let positive = &values[..values.len() / 2];
        for pair in positive.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            let (below, above) = (middle.next_down(), middle.next_up());
            assert_eq!((nearest(format, below), nearest(format, above)), (pair[0], pair[1]));
            let even = if format.nearest(pair[0]) % 2 == 0 { pair[0] } else { pair[1] };
            assert_eq!(nearest(format, middle), even);
            assert_eq!(nearest(format, -above), -pair[1]);
        }
        assert_eq!(nearest(format, f32::MAX), format.max());
        assert_eq!(nearest(format, -1e9), -format.max());
        assert_eq!(nearest(format, format.max() * 1.2), format.max());
    }
}

fn nearest(format: Format, value: f32) -> f32 {
    format.values()[usize::from(format.nearest(value))]
}

#[test]
fn scales_reach_the_largest_number() {
    assert_eq!(scale_for(896.0, Format::E4m3, false), 2.0);
    assert_eq!(scale_for(0.0, Format::E4m3, false), 1.0);
    assert_eq!(scale_for(896.0, Format::E4m3, true), 2.0);
    assert_eq!(scale_for(897.0, Format::E4m3, true), 4.0);
    assert_eq!(scale_for(3.0, Format::E2m1, true), 0.5);
    assert_eq!(scale_for(3.1, Format::E2m1, true), 1.0);
    assert!(scale_for(1e-45, Format::E4m3, false) > 0.0);
    assert_eq!(e8m0(e8m0_of(0.5)), 0.5);
}

#[test]
fn codes_that_are_no_numbers_are_found() {
    let mut bytes = vec![0x7e; 10_000];
    assert_eq!(find_nan(&bytes, Format::E4m3), None);
    bytes[9_000] = 0xff;
    assert_eq!(find_nan(&bytes, Format::E4m3), Some(9_000));
    bytes[5] = 0x7f;
    assert_eq!(find_nan(&bytes, Format::E4m3), Some(5));
    assert_eq!(find_nan(&bytes, Format::E2m1), None);
}
