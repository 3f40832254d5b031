// Writes the neighbourhood of every pixel of a result as one row of a matrix, for convolutions with few channels or a
// 1x1 kernel.
//
// A thread writes eight 16-bit numbers at once, and reads them at once if they are channels of one place.
// Within a row the channels of one place come first, then the next place to the right, then the next line. Numbers
// outside the image, or beyond the last place, are zero.

extern "C" __global__ void patches(
    uint4* rows, const unsigned short* x, int vectors, int vectors_of_row, int length,
    int channels, int height, int width, int of_image, int of_channel, int of_line, int of_column,
    int lines, int columns, int kernel_width, int down, int across, int above, int before, int dilated_down, int dilated_across
) {
    for (long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x; at < vectors; at += (long long)gridDim.x * blockDim.x) {
        int row = (int)(at / vectors_of_row);
        int place = ((int)(at - (long long)row * vectors_of_row)) * 8;
        int column = row % columns, rest = row / columns;
        int line = rest % lines, image = rest / lines;
        const unsigned short* source = x + (long long)image * of_image;
        int channel = place % channels, neighbour = place / channels;
        int right = neighbour % kernel_width, below = neighbour / kernel_width;
        if (of_channel == 1 && channels % 8 == 0) {  // eight channels of one place; memory is aligned to 16 bytes
            int y = line * down - above + below * dilated_down, z = column * across - before + right * dilated_across;
            bool inside = y >= 0 && y < height && z >= 0 && z < width;
            const unsigned short* there = source + (long long)y * of_line + (long long)z * of_column + channel;
            rows[at] = inside ? *(const uint4*)there : make_uint4(0, 0, 0, 0);
            continue;
        }
        unsigned int words[4];
        for (int half = 0; half < 8; ++half) {
            unsigned int number = 0;
            if (place + half < length) {
                int y = line * down - above + below * dilated_down;
                int z = column * across - before + right * dilated_across;
                if (y >= 0 && y < height && z >= 0 && z < width)
                    number = source[(long long)channel * of_channel + (long long)y * of_line + (long long)z * of_column];
            }
            words[half / 2] = half % 2 ? words[half / 2] | number << 16 : number;
            if (++channel == channels) {
                channel = 0;
                if (++right == kernel_width) right = 0, ++below;
            }
        }
        rows[at] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
