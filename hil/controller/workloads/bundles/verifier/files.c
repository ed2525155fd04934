/* Files, and tensors in .npy files. */
#define _GNU_SOURCE
#include "verifier.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct mapping map_file(const char *path)
{
    struct mapping found = {NULL, 0};
    struct stat status;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* do not block on a pipe */
    if (file < 0)
        return found;
    if (fstat(file, &status) == 0 && !S_ISREG(status.st_mode))
        errno = EINVAL;
    else if (status.st_size > 0 && (uint64_t)status.st_size <= SIZE_MAX) {
        void *data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (data != MAP_FAILED)
            found = (struct mapping){data, (uint64_t)status.st_size};
    } else
        errno = status.st_size ? EFBIG : ENODATA;
    int error = errno;
    close(file);
    errno = error;
    return found;
}

void unmap(struct mapping mapping)
{
    if (mapping.data)
        munmap((void *)(uintptr_t)mapping.data, (size_t)mapping.size);
}

static bool write_all(int file, const uint8_t *data, uint64_t size)
{
    while (size) {
        ssize_t wrote = write(file, data, size > 1 << 30 ? 1 << 30 : (size_t)size);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return false;
        data += wrote;
        size -= (uint64_t)wrote;
    }
    return true;
}

static int create(const char *folder, const char *name)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    for (char *slash = path + strlen(folder) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(path, 0700) && errno != EEXIST)
            return -1;
        *slash = '/';
    }
    /* Never overwrite a file: two names may refer to the same file on this file system. */
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

static bool closed(int file, bool fine)
{
    int error = errno;
    if (close(file) && fine)
        return false;
    errno = error;
    return fine;
}

bool write_file(const char *folder, const char *name, const uint8_t *data, uint64_t size)
{
    int file = create(folder, name);
    return file >= 0 && closed(file, write_all(file, data, size));
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
    (void)status, (void)kind, (void)place;
    remove(path);
    return 0;
}

void remove_folder(const char *folder)
{
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

bool write_npy(const char *folder, const char *name, const struct tensor *tensor)
{
    char header[1024];
    int length = snprintf(header, sizeof header, "{'descr': '%c%s', 'fortran_order': False, 'shape': (",
                          tensor->dtype->bytes == 1 ? '|' : '<', tensor->dtype->npy);
    for (unsigned axis = 0; axis < tensor->rank; axis++)
        length += snprintf(header + length, sizeof header - (size_t)length, "%llu,",
                           (unsigned long long)tensor->shape[axis]);
    length += snprintf(header + length, sizeof header - (size_t)length, "), }");
    while ((10 + length + 1) % 64)
        header[length++] = ' ';
    header[length++] = '\n';
    uint8_t start[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (uint8_t)length, (uint8_t)(length >> 8)};
    int file = create(folder, name);
    return file >= 0 && closed(file, write_all(file, start, 10) && write_all(file, (uint8_t *)header, (uint64_t)length) &&
                                         write_all(file, tensor->data, tensor->count * tensor->dtype->bytes));
}

/* Return the text after a key of a header. The header is a Python dict with limited length, so a text search is
 * sufficient. */
static const char *after_key(const char *header, const char *key)
{
    char quoted[32];
    snprintf(quoted, sizeof quoted, "'%s':", key);
    const char *found = strstr(header, quoted);
    if (!found)
        return NULL;
    for (found += strlen(quoted); *found == ' ';)
        found++;
    return found;
}

static const char *read_shape(struct tensor *tensor, const char *at)
{
    if (!at || *at++ != '(')
        return "the header has no shape";
    for (tensor->rank = 0; *at != ')';) {
        uint64_t size = 0;
        unsigned digits = 0;
        for (; *at >= '0' && *at <= '9' && digits < 15; digits++)
            size = size * 10 + (uint64_t)(*at++ - '0');
        if (!digits || tensor->rank == MAX_RANK)
            return "the header has an invalid shape";
        tensor->shape[tensor->rank++] = size;
        while (*at == ',' || *at == ' ')
            at++;
    }
    return "";
}

const char *read_npy(struct tensor *tensor, struct mapping file)
{
    char header[4097], name[8] = "";
    if (file.size < 12 || memcmp(file.data, "\x93NUMPY", 6) || file.data[6] < 1 || file.data[6] > 3)
        return "not a .npy file";
    unsigned start = file.data[6] == 1 ? 10 : 12;
    uint64_t length = file.data[8] | (uint64_t)file.data[9] << 8;
    if (start == 12)
        length |= (uint64_t)file.data[10] << 16 | (uint64_t)file.data[11] << 24;
    if (length >= sizeof header || length > file.size - start)
        return "the header is truncated";
    memcpy(header, file.data + start, length);
    header[length] = 0;
    const char *descr = after_key(header, "descr"), *fortran = after_key(header, "fortran_order");
    if (!descr || *descr++ != '\'' || !*descr || *descr == '>')
        return "unsupported dtype";
    descr++;
    for (size_t i = 0; i < sizeof name - 1 && descr[i] && descr[i] != '\''; i++)
        name[i] = descr[i];
    tensor->dtype = dtype_of_npy(name);
    if (!tensor->dtype)
        return "unsupported dtype";
    const char *wrong = read_shape(tensor, after_key(header, "shape"));
    if (*wrong)
        return wrong;
    tensor->count = 1;
    for (unsigned axis = 0; axis < tensor->rank; axis++)
        if (__builtin_mul_overflow(tensor->count, tensor->shape[axis], &tensor->count) || tensor->count > MAX_ELEMENTS)
            return "the shape exceeds the element limit";
    if (!fortran || (strncmp(fortran, "False", 5) && tensor->rank > 1))
        return "expected C order";
    uint64_t room = file.size - start - length;
    if (tensor->count * tensor->dtype->bytes != room)
        return "the data does not match the header";
    tensor->data = file.data + start + length;
    return "";
}
