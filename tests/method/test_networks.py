"""The networks: K subnetworks in one operation, the encoders' stems, the projection."""

import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torch import Tensor, nn

from deepbregman.method.colours import split_colours
from deepbregman.method.networks import (
    RESNETS,
    TRUNKS,
    BregmanNetwork,
    ColourTrunk,
    Encoder,
    Model,
    build_encoder,
    build_projection,
)


def one_by_one(network: BregmanNetwork, z: Tensor) -> Tensor:
    """Evaluate each subnetwork as two nn.Linear layers, without its output normalisation."""
    columns = []
    for k in range(network.num_subnetworks):
        first = nn.Linear(z.shape[1], network.weight2.shape[1]).double()
        second = nn.Linear(network.weight2.shape[1], 1).double()
        with torch.no_grad():
            first.weight.copy_(network.weight1[:, k].T)
            first.bias.copy_(network.bias1[k])
            second.weight.copy_(network.weight2[k][None])
            second.bias.copy_(network.bias2[k][None])
        hidden = first(z)
        columns.append(second(hidden.relu() if network.activation == "relu" else hidden))
    return torch.cat(columns, dim=1)


class TestSubnetworks:
    @pytest.mark.parametrize("activation", [None, "relu"])
    def test_equal_separate_linear_layers(self, activation):
        network = BregmanNetwork(6, 5, 4, norm="none", activation=activation).double()
        z = torch.randn(7, 6, dtype=torch.float64)
        torch.testing.assert_close(network(z), one_by_one(network, z))

    def test_composing_the_layers_keeps_their_gradients(self):
        network = BregmanNetwork(6, 5, 4, norm="none").double()
        z = torch.randn(7, 6, dtype=torch.float64)
        weights = (network.weight1, network.weight2, network.bias1, network.bias2)
        composed = torch.autograd.grad(network(z).square().sum(), weights)
        network.is_affine = False
        layered = torch.autograd.grad(network(z).square().sum(), weights)
        for a, b in zip(composed, layered, strict=True):
            torch.testing.assert_close(a, b)

    def test_output_is_batch_normalised(self):
        scores = BregmanNetwork(6, 5, 4).train()(torch.randn(64, 6))
        torch.testing.assert_close(scores.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
        torch.testing.assert_close(scores.std(0, correction=0), torch.ones(5), atol=1e-2, rtol=0)

    def test_standard_scores_cannot_grow(self):
        network = BregmanNetwork(6, 5, 4, norm="standard").train().double()
        assert {name for name, _ in network.named_parameters()} == {
            *("weight1", "bias1", "weight2", "bias2")
        }
        with torch.no_grad():
            network.weight2.mul_(100.0)
        scores = network(torch.randn(64, 6, dtype=torch.float64))
        assert torch.allclose(scores.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-9)
        deviation = scores.std(0, correction=0)
        assert torch.allclose(deviation, torch.ones(5, dtype=torch.float64), atol=1e-4)

    @pytest.mark.parametrize("activation", [None, "relu"])
    def test_hidden_is_batch_normalised(self, activation):
        network = BregmanNetwork(6, 5, 4, norm="hidden", activation=activation).train().double()
        z = torch.randn(64, 6, dtype=torch.float64)
        hidden = torch.einsum("nd,dkh->nkh", z, network.weight1) + network.bias1
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
        hidden = hidden if activation is None else hidden.clamp_min(0.0)
        expected = (hidden * network.weight2).sum(2) + network.bias2
        torch.testing.assert_close(network(z), expected)

    def test_input_is_normalised_by_choice(self):
        network = BregmanNetwork(6, 5, 4, norm="none", normalise_input=True)
        z = torch.randn(7, 6)
        torch.testing.assert_close(network(z), network(10 * z))

    def test_subnetworks_start_as_linear_layers_each_on_its_own_draw(self):
        torch.manual_seed(0)
        network = BregmanNetwork(100, 500, 4)
        first, second = nn.Linear(100, 2000), nn.Linear(4, 500)
        for mine, theirs in (
            (network.weight1, first.weight),
            (network.bias1, first.bias),
            (network.weight2, second.weight),
            (network.bias2, second.bias),
        ):
            found, expected = (values.detach().flatten().numpy() for values in (mine, theirs))
            assert ks_2samp(found, expected).pvalue > 1e-3
            assert len(set(found)) > 0.99 * len(found)

    @pytest.mark.parametrize("activation", [None, "relu"])
    def test_dropout_acts_in_training_only(self, activation):
        network = BregmanNetwork(6, 5, 4, norm="none", activation=activation, dropout=0.5)
        z = torch.randn(7, 6)
        assert not torch.equal(network.train()(z), network(z))
        assert torch.equal(network.eval()(z), network(z))

    def test_scores_stay_in_full_precision_under_autocast(self):
        network, z = BregmanNetwork(6, 5, 4), torch.randn(7, 6)
        expected = network(z)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = BregmanNetwork.forward(network, z)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"num_subnetworks": 0}, "num_subnetworks is 0"),
            ({"hidden_features": -1}, "hidden_features is -1"),
            ({"norm": "layer"}, "norm 'layer'"),
            ({"activation": "gelu"}, "activation 'gelu'"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, words):
        with pytest.raises(ValueError, match=words):
            BregmanNetwork(**arguments)


class TestEncoders:
    @pytest.mark.usefixtures("true_encoder")
    @pytest.mark.parametrize("name", TRUNKS)
    def test_widths(self, name):
        """A saved encoder would compute something else with maps of other sides."""
        encoder = build_encoder(name, 32).eval()
        width = {"small": 128, "resnet18": 512, "resnet34": 512}.get(name, 2048)
        assert encoder.num_features == width
        found, maps = encoder.encode_with_maps(torch.rand(2, 3, 16, 16))
        assert found.shape == (2, width)
        sides = [16, 8, 8, 4] if name == "small" else [16, 8, 4, 2]
        assert [part.shape[2:] for part in maps] == [(side, side) for side in sides]

    @pytest.mark.parametrize("name", RESNETS)
    def test_residual_networks_have_torchvisions_layers(self, name):
        import torchvision

        with torch.device("meta"):
            ours = build_encoder(name, 224).trunk.state_dict()
            theirs = getattr(torchvision.models, name)(weights=None).state_dict()
        shapes = {key: value.shape for key, value in theirs.items() if not key.startswith("fc.")}
        assert {key: value.shape for key, value in ours.items()} == shapes

    def test_stem_keeps_the_resolution_of_thumbnails_only(self):
        small, large = build_encoder("resnet18", 64).trunk, build_encoder("resnet18", 65).trunk
        assert (small.conv1.kernel_size, small.conv1.stride) == ((3, 3), (1, 1))
        assert isinstance(small.maxpool, nn.Identity)
        assert (large.conv1.kernel_size, large.conv1.stride) == ((7, 7), (2, 2))
        assert isinstance(large.maxpool, nn.MaxPool2d)

    def test_the_stem_of_thumbnails_starts_as_torchvisions_convolutions(self):
        torch.manual_seed(0)
        weight = build_encoder("resnet18", 32).trunk.conv1.weight.detach()
        deviation = (2.0 / (64 * 3 * 3)) ** 0.5  # He et al. 2015, by the outputs
        assert kstest((weight / deviation).flatten().numpy(), "norm").pvalue > 1e-3

    def test_standard_stem_is_torchvisions_network(self):
        import torchvision

        ours = build_encoder("resnet18", 224).eval()
        theirs = torchvision.models.resnet18(weights=None).eval()
        state = {k: v for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
        ours.trunk.load_state_dict(state)
        theirs.fc = nn.Identity()
        images = torch.rand(2, 3, 96, 96)
        torch.testing.assert_close(ours(images), theirs(images))

    def test_uint8_and_float_images_give_the_same(self):
        encoder = build_encoder("small", 8, mean=(0.1, 0.2, 0.3), deviation=(0.5, 0.6, 0.7)).eval()
        images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
        torch.testing.assert_close(encoder(images), encoder(images / 255.0))
        from_numpy = torch.from_numpy(images.numpy() / 255.0)  # in float64
        torch.testing.assert_close(encoder(images), encoder(from_numpy))

    def test_pixels_are_normalised_by_mean_and_deviation(self):
        class Mean(nn.Module):
            def forward(self, images: Tensor) -> Tensor:
                return images.mean(dim=(2, 3))

        encoder = Encoder(Mean(), 3, mean=(0.1, 0.2, 0.3), deviation=(0.5, 0.5, 2.0))
        found = encoder(torch.full((1, 3, 2, 2), 0.5))
        torch.testing.assert_close(found, torch.tensor([[0.8, 0.6, 0.1]]))

    def test_channels_come_before_rows(self):
        encoder = build_encoder("small", 8).eval()
        assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, encoder.num_features)  # grey
        with pytest.raises(ValueError, match=r"shape \(2, 8, 8, 3\): expected \(N, 3, H, W\)"):
            encoder(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))

    def test_unknown_names_are_refused(self):
        with pytest.raises(ValueError, match="'vgg' is not one of resnet18"):
            build_encoder("vgg", 32)
        with pytest.raises(ValueError, match="'big' is not one of auto"):
            build_encoder("resnet18", 32, stem="big")


def test_projection_is_the_papers():
    layers = build_projection(512)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert layers(torch.rand(4, 512)).shape == (4, 128)


def test_a_projection_can_be_deeper_and_end_in_a_norm():
    layers = build_projection(512, 32, 8, layers=3, output_norm=True)
    hidden = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert [type(layer) for layer in layers] == [*hidden, *hidden, nn.Linear, nn.BatchNorm1d]
    assert [layer.weight.shape for layer in layers if isinstance(layer, nn.Linear)] == [
        *((32, 512), (32, 32), (8, 32)),
    ]
    found = layers(torch.rand(50, 512))
    torch.testing.assert_close(found.mean(0), torch.zeros(8), atol=1e-5, rtol=0.0)
    assert layers[-1].weight is None


@pytest.mark.parametrize("space", ["lab", "ycbcr"])
def test_brightness_and_colours_go_to_trunks_of_their_own(space):
    """From -2 to 2, as photos have it that are normalised by their mean and deviation."""
    images = torch.rand(3, 3, 4, 4)
    found = ColourTrunk(nn.Flatten(), nn.Sequential(nn.Flatten(), nn.ReLU()), space)(images)
    bright, colour = (4.0 * part.flatten(1) - 2.0 for part in split_colours(images, space))
    torch.testing.assert_close(found, torch.cat([bright, colour.clamp_min(0.0)], dim=1))


@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_of_a_projection_has_a_norm_or_a_bias(norm, output_norm):
    """A norm takes away what a bias adds."""
    layers = build_projection(6, 5, 4, norm=norm, layers=3, output_norm=output_norm)
    normed = [
        isinstance(after, nn.BatchNorm1d)
        for layer, after in zip(layers, [*layers[1:], None], strict=True)
        if isinstance(layer, nn.Linear)
    ]
    assert normed == [norm, norm, output_norm]
    biased = [layer.bias is not None for layer in layers if isinstance(layer, nn.Linear)]
    assert biased == [not each for each in normed]


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 8, 3), (1, 2, 3, 8, 8)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected \(N, 3, H, W\)"):
        build_encoder("small", 8)(torch.rand(shape))


def test_model_passes_h_to_z_to_scores():
    encoder = build_encoder("small", 8)
    projection = build_projection(encoder.num_features, 16, 8)
    model = Model(encoder, projection, BregmanNetwork(8, 5, 4)).eval()
    images = torch.rand(3, 3, 8, 8)
    h, z, scores = model(images)
    torch.testing.assert_close(h, encoder(images))
    torch.testing.assert_close(z, projection(h))
    assert model.divergence_network is not None
    torch.testing.assert_close(scores, model.divergence_network(z))
    assert Model(encoder, projection, None)(images).scores is None
