# Runs commands from the serial line, independent of the board's network and sshd. Input: a line with number, timeout in
# seconds, command and size of stdin, followed by stdin. Output: a line with number, exit status, stdout and stderr.
# Command, stdout and stderr are in base64. All tools are from busybox.
umask 077
export PATH=/usr/sbin:/usr/bin HOME=/root
mkdir /run/serial-line && cd / || exit
while :; do
    while read -r number limit command size; do
        : >/run/serial-line/stdin
        [ "$size" = 0 ] || dd "bs=$size" count=1 iflag=fullblock of=/run/serial-line/stdin <&3
        timeout -s KILL "$limit" /bin/sh -c "umask 022; $(echo "$command" | base64 -d)" \
            </run/serial-line/stdin >/run/serial-line/stdout 2>/run/serial-line/stderr 3>&-
        code=$?
        echo "$number $code $(base64 -w 0 /run/serial-line/stdout) $(base64 -w 0 /run/serial-line/stderr)" >&3
    done <&3
    # The host is not connected.
    sleep 0.2
done 3<>"$(echo /dev/vport*p1)"
