"""Bytes and labels to uint8 batches on the training device."""

from deepbregman.data.batches import Batch as Batch
from deepbregman.data.batches import Batches as Batches
from deepbregman.data.frames import UnreadableImage as UnreadableImage
from deepbregman.data.images import ArrayImages as ArrayImages
from deepbregman.data.images import FileImages as FileImages
from deepbregman.data.images import Images as Images
from deepbregman.data.images import Progress as Progress
from deepbregman.data.images import Source as Source
from deepbregman.data.images import Split as Split
from deepbregman.data.images import fingerprint as fingerprint
from deepbregman.data.images import join_images as join_images
from deepbregman.data.listings import open_files as open_files
from deepbregman.data.listings import without_unreadable as without_unreadable
from deepbregman.data.placement import open_batches as open_batches
from deepbregman.data.resident import ResidentBatches as ResidentBatches
from deepbregman.data.sources import PUBLISHED as PUBLISHED
from deepbregman.data.sources import open_source as open_source
from deepbregman.data.splits import grouped_split as grouped_split
from deepbregman.data.splits import labelled_subset as labelled_subset
from deepbregman.data.splits import stratified_split as stratified_split
from deepbregman.data.statistics import channel_statistics as channel_statistics
from deepbregman.data.streaming import StreamingBatches as StreamingBatches
