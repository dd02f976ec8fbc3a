//! Frequencies and tables against the formulas, written out in f64.

use super::*;

fn yarn() -> RopeConfig {
    RopeConfig { rope_theta: 10_000.0, yarn: Some(YarnConfig::new(4.0, 256)) }
}

fn argument(result: Result<impl std::fmt::Debug, MlaError>) -> &'static str {
    match result {
        Err(MlaError::Value { argument, .. }) => argument,
        other => panic!("{other:?}"),
    }
}

#[test]
fn plain_tables_are_cosines_and_sines_of_position_times_frequency() {
    let rope = RopeConfig { rope_theta: 500.0, yarn: None };
    for width in [0, 2, 6, 14] {
        let positions = [0, 1, 7, 1023];
        let (cos, sin) = rope.cos_sin(width, &positions).unwrap();
        assert_eq!((cos.len(), sin.len()), (4 * width / 2, 4 * width / 2));
        for (row, &position) in positions.iter().enumerate() {
            for i in 0..width / 2 {
                let angle = position as f64 / 500f64.powf(2.0 * i as f64 / width as f64);
                let (s, c) = angle.sin_cos();
                let at = row * width / 2 + i;
                // The angle is rounded to f32.
                let bound = 1e-6 + angle * 2f64.powi(-22);
                assert!((f64::from(cos[at]) - c).abs() < bound && (f64::from(sin[at]) - s).abs() < bound);
            }
        }
    }
}

/// Width 16, 256 trained positions: the range is 0 to 4, so that the ramp is i / 4 up to 1.
#[test]
fn yarn_divides_slow_channels_and_keeps_the_fastest() {
    for (i, theta) in yarn().inv_freq(16).unwrap().into_iter().enumerate() {
        let (plain, ramp) = (10_000f64.powf(-2.0 * i as f64 / 16.0), (i as f64 / 4.0).min(1.0));
        assert!((theta - plain * (1.0 - ramp) - plain / 4.0 * ramp).abs() < 1e-15, "{i}");
    }
    let factor = 0.1 * 4f64.ln() + 1.0;
    assert!((yarn().attention_factor() - factor).abs() < 1e-15);
    let (cos, _) = yarn().cos_sin(16, &[0]).unwrap();
    assert_eq!(cos, [factor as f32; 8]);
}

#[test]
fn what_is_out_of_range_is_named() {
    let with = |change: fn(&mut YarnConfig)| {
        let mut yarn = YarnConfig::new(4.0, 256);
        change(&mut yarn);
        argument(RopeConfig { rope_theta: 1e4, yarn: Some(yarn) }.validate())
    };
    assert_eq!(argument(RopeConfig { rope_theta: f64::NAN, yarn: None }.inv_freq(8)), "rope_theta");
    assert_eq!(argument(RopeConfig { rope_theta: 1.0, yarn: None }.cos_sin(8, &[0])), "rope_theta");
    assert_eq!(argument(yarn().inv_freq(7)), "width");
    assert_eq!(argument(yarn().inv_freq(usize::MAX - 1)), "width");
    assert_eq!(with(|yarn| yarn.factor = 0.5), "factor");
    assert_eq!(with(|yarn| yarn.original_max_position_embeddings = 0), "original_max_position_embeddings");
    assert_eq!(with(|yarn| yarn.beta_slow = 40.0), "beta_fast");
    assert_eq!(with(|yarn| yarn.mscale = Some(f64::INFINITY)), "mscale");
    assert_eq!(with(|yarn| yarn.attention_factor = Some(f64::NAN)), "attention_factor");
}

#[cfg(feature = "flex")]
#[test]
fn tables_are_on_the_device_and_too_large_ones_are_refused() {
    let device = Device::flex();
    let [cos, sin] = yarn().tables(16, &[5, 0, 5], &device).unwrap();
    let expected = yarn().cos_sin(16, &[5, 0, 5]).unwrap();
    let values = [cos, sin].map(|table| {
        assert_eq!((table.dims(), table.dtype()), ([3, 8], DType::F32));
        table.into_data().try_to_vec::<f32>().unwrap()
    });
    assert_eq!(values, [expected.0, expected.1]);
    assert_eq!(yarn().tables(16, &[], &device).unwrap()[0].dims(), [0, 8]);
    assert_eq!(argument(yarn().tables(3, &[1], &device)), "width");
    let huge = yarn().tables(usize::MAX - 1, &[1, 2], &device);
    assert!(matches!(huge, Err(MlaError::DeviceLimit { argument: "positions", .. })), "{huge:?}");
}
